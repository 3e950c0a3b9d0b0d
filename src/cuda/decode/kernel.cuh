// The decode kernel: few query rows, long caches, 16-, 8- and 4-bit. Included once per cache type.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cuda/decode/copies.cuh"
#include "cuda/decode/formats.cuh"
#include "cuda/decode/kernel.h"
#include "cuda/decode/products.cuh"
#include "cuda/decode/query.cuh"
#include "cuda/decode/results.cuh"
#include "cuda/decode/ring.cuh"
#include "cuda/decode/shape.h"
#include "cuda/decode/tree.cuh"
#include "cuda/decode/units.cuh"
#include "cuda/device/barrier.cuh"
#include "cuda/device/overlap.cuh"
#include "cuda/device/sequences.cuh"
#include "cuda/launch.cuh"

namespace octavo::cuda::decode {

// A word of a slot's note: read by the lane that releases the slot.
template <typename Word>
__device__ inline Word noted(const Word& word) {
  Word read{};
  if (threadIdx.x % 32 == 0) read = word;
  return __shfl_sync(0xffffffffu, read, 0);
}

// What a working warp keeps from unit to unit.
template <typename K>
struct WarpState {
  Ring<K> ring;
  std::uint32_t segments = 0;  // that it has handed over
};

// A working warp on a unit, for one KV head: some keys of every tile. K and S: see QueryRows.
template <typename K, typename S>
struct Worker : Results<K, S> {
  using Base = Results<K, S>;
  using Rows = typename Base::Rows;
  using P = Products<S>;
  static constexpr CacheType kType = S::kType;
  static constexpr int kTiles = S::kTiles;
  using C = typename Rows::C;
  using Item = typename Base::Item;
  using Base::exchanged;
  using Base::exchanged_state;
  using Base::fold_item;
  using Base::has_item;
  using Base::item;
  using Base::sync_workers;
  using Base::unit;
  using Rows::call;
  using Rows::first_head;
  using Rows::first_row;
  using Rows::heads;
  using Rows::is_row;
  using Rows::layout;
  using Rows::range_of;
  using Rows::record;
  using Rows::rows;
  using Rows::shared;
  using Rows::token_of;
  using Rows::work;
  static constexpr int kKeyTiles = P::kKeyTiles;
  // Of the warp's sums.
  static constexpr int kChannelTiles = S::kSharesWeights ? P::kOwnTiles : P::kChannelTiles;
  static constexpr int kRowTiles = S::kTiles;
  static constexpr std::uint32_t kAllKeys = S::kKeys == 32 ? 0xffffffffu : 0xffffu;
  // Four row tiles leave no registers for what is read once a tile.
  static constexpr bool kRowFactsInRegisters = kTiles < 4;
  // Weights of zero do not clear these types' NaN and infinities.
  static constexpr bool kHasNan = S::kWide || kType == CacheType::kFloat8E4M3FN;

  const int lane;
  const int head, group;  // of the unit's heads, of the warps for this one
  Ring<K>& ring;
  std::uint32_t& segments;
  const std::uint32_t key_lane, value_lane;  // where in a slot this lane reads operands of K and of V

  std::int32_t all_see_from = 0, all_see_to = 0;  // keys that every row of the unit sees
  std::uint32_t turn = 0;                         // which place the weights of a tile have

  std::uint32_t query[S::kQueryInRegisters ? S::kSteps : 1][kRowTiles][2];
  float sums[kChannelTiles][kRowTiles][4];
  float maximum[kRowTiles][2], weight[kRowTiles][2], scale_of_row[kRowTiles][2];
  float limit[kRowTiles][2];  // scores above it move the maximum
  float bias[kRowTiles][2];   // what scores start from

  __device__ Worker(const Call& call_, const Work& work_, std::byte* shared_, WarpState<K>& state)
      : Base(call_, work_, shared_),
        lane(static_cast<int>(threadIdx.x) % 32),
        head(static_cast<int>(threadIdx.x) / 32 / S::kGroups),
        group(static_cast<int>(threadIdx.x) / 32 % S::kGroups),
        ring(state.ring),
        segments(state.segments),
        key_lane(static_cast<std::uint32_t>(P::key_operand(head, group * S::kKeys, lane))),
        value_lane(static_cast<std::uint32_t>(S::kSharesWeights ? P::own_value_operand(head, group, lane)
                                                                : P::value_operand(head, group * S::kKeys, lane))) {}

  // ---- the unit ----

  // Its facts, and Q as fragments in shared memory, with K's PER_TENSOR scale. All working warps; a barrier has to
  // follow.
  __device__ void prepare(const Unit& unit_, float key_scale) {
    unit = unit_;
    record = unit.span;
    first_head = unit.head_group * S::kHeads;
    heads = min(S::kHeads, call.kv_num_heads - first_head);
    first_row = unit.row_tile * S::kRows;
    rows = min(S::kRows, record.new_tokens * call.group - first_row);
    this->prepare_query(key_scale);
    // Positions ascend with the tokens: the first and the last bound what all see.
    const KeyRange first = range_of(0);
    const KeyRange last = range_of(record.new_tokens - 1);
    all_see_from = max(first.begin, last.begin);
    all_see_to = min(min(first.end, last.end), unit.end);
  }

  __device__ std::uint32_t query_word(int step, int tile, int reg) const {
    return this->template at<std::uint32_t>(
        layout.query)[((head * kTiles + tile) * S::kSteps + step) * 64 + lane * 2 + reg];
  }

  __device__ void load_query() {
    if constexpr (S::kQueryInRegisters) {
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step) {
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          query[step][tile][0] = query_word(step, tile, 0);
          query[step][tile][1] = query_word(step, tile, 1);
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if constexpr (kRowFactsInRegisters) {
          scale_of_row[tile][j] = this->template at<float>(layout.row_scale)[row_of(tile, j)];
          bias[tile][j] = kCodeBias<kType> != 0 ? this->template at<float>(layout.row_bias)[row_of(tile, j)] : 0.0f;
        }
      }
    }
  }

  // What makes a base-2 logit of a row's product.
  __device__ float scale(int tile, int j) const {
    if constexpr (kRowFactsInRegisters) return scale_of_row[tile][j];
    return this->template at<float>(layout.row_scale)[row_of(tile, j)];
  }

  __device__ std::uint32_t query_at(int step, int tile, int reg) const {
    if constexpr (S::kQueryInRegisters) {
      return query[step][tile][reg];
    } else {
      return query_word(step, tile, reg);
    }
  }

  // This lane's rows in the products, among the rows of all heads.
  __device__ int row_of(int tile, int j) const {
    return head * S::kRows + tile * 8 + lane % 4 * 2 + j;
  }

  // ---- softmax ----

  // Softcap: products become base-2 logits.
  __device__ void cap(float (&s)[kKeyTiles][kRowTiles][4]) const {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        // tanh(x) = 1 - 2 / (1 + e^(2x)), with e^(2x) in base 2. Its error is absolute, 2^-23 or so of the cap.
        constexpr float kLargestForThat = 1000.0f;
        const float top = call.softcap * kLog2E;
        const float of_tanh = scale(tile, j) * call.inverse_softcap;  // tanh's argument times log2(e)
        const bool direct = call.softcap > kLargestForThat;
        const float factor = direct ? of_tanh * kLn2 : of_tanh * 2.0f;
#pragma unroll
        for (int k = 0; k < kKeyTiles; ++k) {
#pragma unroll
          for (int i = j; i < 4; i += 2) {
            const float x = s[k][tile][i] * factor;
            s[k][tile][i] = direct ? tanhf(x) * top : fmaf(__fdividef(-2.0f, 1.0f + exp2_approximate(x)), top, top);
          }
        }
      }
    }
  }

  // Keys that a row does not attend to become -inf.
  __device__ void hide(std::int32_t base, std::uint32_t mapped, float (&s)[kKeyTiles][kRowTiles][4]) const {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = row_of(tile, j);
        std::uint32_t seen = 0;
        if (is_row(row)) {
          const KeyRange range = range_of(token_of(row % S::kRows));
          const std::int32_t from = max(range.begin - base, 0);
          const std::int32_t to = min(min(range.end, unit.end) - base, 32);
          if (from < to) seen = (0xffffffffu >> (32 - to)) & (0xffffffffu << from) & mapped;
        }
#pragma unroll
        for (int k = 0; k < kKeyTiles; ++k) {
#pragma unroll
          for (int i = j; i < 4; i += 2) {
            if ((seen >> (k * 16 + i / 2 * 8 + key_of_row(lane / 4)) & 1u) == 0) s[k][tile][i] = -INFINITY;
          }
        }
      }
    }
  }

  // The highest score of a row among this warp's keys.
  __device__ static float highest(const float (&s)[kKeyTiles][kRowTiles][4], int tile, int j) {
    float top = -INFINITY;
#pragma unroll
    for (int k = 0; k < kKeyTiles; ++k) top = fmaxf(top, fmaxf(s[k][tile][j], s[k][tile][j + 2]));
#pragma unroll
    for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    return top;
  }

  // Sums and weights so far are brought to a new maximum where a score is far above the old one. "Far" is 2^8: weights
  // stay far below float16's largest number, and after the first step of a segment few scores are. `top_of(tile, j)`:
  // the highest score of a row.
  template <typename Top>
  __device__ void raise_maximum(const Top& top_of, bool capped) {
    constexpr float kFar = 8.0f;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float top = top_of(tile, j);
        if (!(top > limit[tile][j])) top = maximum[tile][j];
        const float unit_scale = capped ? 1.0f : scale(tile, j);
        // From -inf: nothing is there yet to be scaled, and a scale of 0 would make NaN of it.
        const float factor = top == maximum[tile][j]         ? 1.0f
                             : maximum[tile][j] == -INFINITY ? 0.0f
                                                             : exp2_approximate((maximum[tile][j] - top) * unit_scale);
        maximum[tile][j] = top;
        if (top > -INFINITY) limit[tile][j] = top + __fdividef(kFar, unit_scale);
        weight[tile][j] *= factor;
#pragma unroll
        for (int c = 0; c < kChannelTiles; ++c) {
          sums[c][tile][j] *= factor;
          sums[c][tile][j + 2] *= factor;
        }
      }
    }
  }

  // Whether some score of this lane is far above its row's maximum.
  __device__ bool has_far(const float (&s)[kKeyTiles][kRowTiles][4]) const {
    bool far = false;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int k = 0; k < kKeyTiles; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) far = far || s[k][tile][i] > limit[tile][i % 2];
      }
    }
    return far;
  }

  // Scores to weights, as words of two rows, and to `total`, which gets their sums.
  template <bool kMasked>
  __device__ void weigh(const float (&s)[kKeyTiles][kRowTiles][4], bool capped, float (&total)[kRowTiles][2],
                        std::uint32_t (&p)[kKeyTiles][kRowTiles][2]) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      float shift[2], factor[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        factor[j] = capped ? 1.0f : scale(tile, j);
        shift[j] = maximum[tile][j] == -INFINITY ? 0.0f : maximum[tile][j] * factor[j];
      }
#pragma unroll
      for (int k = 0; k < kKeyTiles; ++k) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] = exp2_approximate(fmaf(s[k][tile][i], factor[i % 2], -shift[i % 2]));
          if constexpr (kMasked) x[i] = s[k][tile][i] == -INFINITY ? 0.0f : x[i];
          total[tile][i % 2] += x[i];
        }
        p[k][tile][0] = pack<C>(x[0], x[1]);
        p[k][tile][1] = pack<C>(x[2], x[3]);
      }
    }
  }

  // ---- segments ----

  __device__ void start_segment() {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        maximum[tile][j] = limit[tile][j] = -INFINITY;
        weight[tile][j] = 0.0f;
      }
#pragma unroll
      for (int c = 0; c < kChannelTiles; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[c][tile][i] = 0.0f;
      }
    }
  }

  // A tile, whose keys begin at `first`.
  __device__ void do_tile(std::int32_t first) {
    const bool capped = call.softcap > 0.0f;
    const std::int32_t base = first + group * S::kKeys;
    ring.wait_full();
    const std::uint32_t live = noted(ring.note().live[group * S::kKeys / 32]) >> group * S::kKeys % 32 & kAllKeys;
    std::uint32_t all_live[S::kTileKeys / 32];  // where weights are shared
    if constexpr (S::kSharesWeights && kHasNan) {
#pragma unroll
      for (int i = 0; i < S::kTileKeys / 32; ++i) all_live[i] = noted(ring.note().live[i]);
    }
    if constexpr (!kRowFactsInRegisters && kCodeBias<kType> != 0) {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
        for (int j = 0; j < 2; ++j) bias[tile][j] = this->template at<float>(layout.row_bias)[row_of(tile, j)];
      }
    }
    float s[kKeyTiles][kRowTiles][4];
    std::uint32_t loaded = P::multiply_keys(
        ring.slot() + key_lane, [&](int step, int tile, int reg) { return query_at(step, tile, reg); }, bias, s);
    release(loaded | live);
    if (capped) [[unlikely]]
      cap(s);
    const bool whole = live == kAllKeys && base >= all_see_from && base + S::kKeys <= all_see_to;
    if (!whole) [[unlikely]]
      hide(base, live, s);
    if constexpr (S::kSharesWeights) {
      share_weights(s, capped, whole);
      ring.wait_full();
      loaded = multiply_own_values(all_live);
    } else {
      if (__any_sync(0xffffffffu, has_far(s))) [[unlikely]]
        raise_maximum([&](int tile, int j) { return highest(s, tile, j); }, capped);
      std::uint32_t p[kKeyTiles][kRowTiles][2];
      weigh(s, capped, whole, weight, p);
#pragma unroll
      for (int k = 0; k < kKeyTiles; ++k) {
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
          for (int half = 0; half < 2; ++half) p[k][tile][half] = transpose(p[k][tile][half]);
        }
      }
      ring.wait_full();
      // A weight of zero times whatever stands where no key of the sequence does may be NaN.
      std::uint32_t mask[kKeyTiles][2];
      if (kHasNan && !whole) [[unlikely]] {
        P::find_live(live, lane, mask);
        loaded = P::template multiply_values<kHasNan>(ring.slot() + value_lane, p, mask, sums);
      } else {
        loaded = P::template multiply_values<false>(ring.slot() + value_lane, p, mask, sums);
      }
    }
    release(loaded);
  }

  __device__ void weigh(const float (&s)[kKeyTiles][kRowTiles][4], bool capped, bool whole,
                        float (&total)[kRowTiles][2], std::uint32_t (&p)[kKeyTiles][kRowTiles][2]) {
    if (whole) [[likely]] {
      weigh<false>(s, capped, total, p);
    } else {
      weigh<true>(s, capped, total, p);
    }
  }

  // ---- shared weights ----

  // Weights of this warp's keys to where the warps of its head read them, all relative to the same maxima: by those so
  // far; where a score of some warp is far above, once more by those of all. The weights of the tile before may still
  // be read meanwhile: two tiles' have places, in turn.
  __device__ void share_weights(const float (&s)[kKeyTiles][kRowTiles][4], bool capped, bool whole) {
    turn ^= 1u;
    const std::uint32_t to = weights_of_turn() + P::weight_to(group * S::kKeys, lane);
    constexpr int kTeam = S::kGroups * 32;  // threads
    auto* const maxima = this->template at<float>(layout.maxima);
    float total[kRowTiles][2];
    bool far = has_far(s);
#pragma unroll 1
    while (true) {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) total[tile][0] = total[tile][1] = 0.0f;
      std::uint32_t p[kKeyTiles][kRowTiles][2];
      weigh(s, capped, whole, total, p);
      P::share_weights(to, p);
      if (!any_of_threads<kTeam>(3 + head, far)) [[likely]]
        break;
      far = false;
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float top = highest(s, tile, j);
          if (lane < 4) maxima[group * S::kAllRows + row_of(tile, j)] = top;
        }
      }
      sync_threads<kTeam>(3 + head);
      raise_maximum(
          [&](int tile, int j) {
            float top = -INFINITY;
#pragma unroll
            for (int g = 0; g < S::kGroups; ++g) top = fmaxf(top, maxima[g * S::kAllRows + row_of(tile, j)]);
            return top;
          },
          capped);
    }
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 2; ++j) weight[tile][j] += total[tile][j];
    }
  }

  __device__ std::uint32_t weights_of_turn() const {
    return shared_address(shared + layout.weights) + turn * S::kWeightBytes +
           static_cast<std::uint32_t>(head * (S::kTileKeys / 8 * kRowTiles * 128));
  }

  // `live`: the keys of the tile.
  __device__ std::uint32_t multiply_own_values(const std::uint32_t (&live)[S::kTileKeys / 32]) {
    const std::uint32_t from = ring.slot() + value_lane;
    const std::uint32_t weights = weights_of_turn() + P::weight_from(lane);
    const auto live_of = [&](int word) { return live[word]; };
    if constexpr (kHasNan) {
      std::uint32_t all = 0xffffffffu;
#pragma unroll
      for (int i = 0; i < S::kTileKeys / 32; ++i) all &= live[i];
      if (all != 0xffffffffu) [[unlikely]]
        return P::template multiply_own_values<true>(from, weights, lane, live_of, sums);
    }
    return P::template multiply_own_values<false>(from, weights, lane, live_of, sums);
  }

  __device__ void release(std::uint32_t loaded) {
    __syncwarp();
    if (lane == 0) ring.release(loaded & work.no_bits);
    ring.advance();
  }

  // The sums of this warp over a segment, to whoever folds them.
  __device__ void hand_over() {
    if (segments > 0) wait_for_phase(folded(), (segments - 1) % 2);
    ++segments;
    const int r = lane / 4;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = row_of(tile, j);
        float all = weight[tile][j];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) all += __shfl_xor_sync(0xffffffffu, all, step);
        const float factor = call.softcap > 0.0f ? 1.0f : scale(tile, j);
        if (lane < 4) {
          exchanged_state(group, row) =
              make_float2(maximum[tile][j] == -INFINITY ? -INFINITY : maximum[tile][j] * factor, all);
        }
        if (is_row(row)) {
          float* const mine = exchanged(S::kSharesWeights ? 0 : group, row);
          const int first_tile = S::kSharesWeights ? group * kChannelTiles : 0;
#pragma unroll
          for (int c = 0; c < kChannelTiles; ++c) {
            mine[value_channel<kType>(first_tile + c, r)] = sums[c][tile][j];
            mine[value_channel<kType>(first_tile + c, r + 8)] = sums[c][tile][j + 2];
          }
        }
      }
    }
    arrive(handed());
  }

  // The segment that was handed over last joins the tree: this thread's part of what all warps have handed over.
  __device__ void fold_segment(std::int32_t index, bool last) const {
    wait_for_phase(handed(), (segments - 1) % 2);
#pragma unroll 1
    for (int i = 0; i < S::kItems; ++i) {
      const Item of = item(i);
      if (has_item(of)) fold_item(of, index, last);
    }
    arrive(folded());
  }

  __device__ std::uint32_t handed() const {
    return shared_address(shared + layout.handed);
  }
  __device__ std::uint32_t folded() const {
    return shared_address(shared + layout.folded);
  }

  // All keys of the unit; the nodes over all of them go to the output or the workspace. A segment is folded a tile
  // later, so that a warp seldom waits for another.
  __device__ void walk() {
    // Where the bound leaves no room for a tree, all keys are one segment, however many there are.
    const std::int64_t segment_keys = work.levels == 0 ? std::int64_t{1} << 31 : std::int64_t{1} << segment_shift_of();
    std::int32_t base = unit.begin;
    std::int32_t index = 0;
    for (; base < unit.end; ++index) {
      start_segment();
      const auto end = static_cast<std::int32_t>(min(base + segment_keys, std::int64_t{unit.end}));
      bool waiting = index > 0;
#pragma unroll 1
      for (; base < end; base += S::kTileKeys) {
        do_tile(base);
        if (waiting) [[unlikely]]
          fold_segment(index - 1, false);
        waiting = false;
      }
      hand_over();
    }
    if (index > 0) fold_segment(index - 1, true);
  }

  __device__ int segment_shift_of() const {
    return segment_shift(keys_of(call, work, record).count(), work.window > 0);
  }

  // All of a unit.
  __device__ void run(const Unit& unit_) {
    prepare(unit_, this->facts().key_scale);
    wait_for_earlier_kernels();
    sync_workers();
    load_query();
    walk();
    this->merge_if_last();
  }
};

// What the working warps do with a unit.
template <typename K>
__device__ inline void work_on(const Call& call, const Work& work, std::byte* shared, const Unit& unit,
                               WarpState<K>& state) {
  if constexpr (K::kSharesWeights) {
    if (unit.span.new_tokens * call.group > kOneTileRows) {
      Worker<K, K>(call, work, shared, state).run(unit);
      return;
    }
  }
  Worker<K, typename K::OneTile>(call, work, shared, state).run(unit);
}

// What the two warps that copy do, from the unit `index` on. `next`: a word in shared memory that they share.
template <typename Units, typename Copies>
__device__ inline void copy_units(const Units& units, Copies copies, std::int32_t index, const Work& work,
                                  std::int32_t* next) {
  while (index < units.total()) {
    copies.start(units.find(index), index);
    wait_for_earlier_kernels();
    copies.send();
    if (units.total() <= static_cast<std::int32_t>(gridDim.x)) break;
    sync_threads<64>(2);
    if (!copies.of_values() && threadIdx.x % 32 == 0) {
      const std::uint32_t taken = atomicAdd(work.next_unit, 1u);
      // Each unit behind the first of each block is taken once, and each block asks once in vain. The first kernel of a
      // call zeroes counters too; a replay of the attention alone (bench/gpu) has none.
      if (taken + 1 == static_cast<std::uint32_t>(units.total())) *work.next_unit = 0;
      *next = static_cast<std::int32_t>(gridDim.x + taken);
    }
    sync_threads<64>(2);
    index = *next;
  }
  copies.send_end();
}

template <CacheType kType, int kHead, int kTiles>
__global__ void __launch_bounds__(Shape<kType, kHead, kTiles>::kThreads, Shape<kType, kHead, kTiles>::kBlocksPerSm)
    decode(const __grid_constant__ Call call, const __grid_constant__ Work work, const __grid_constant__ Maps maps) {
  using S = Shape<kType, kHead, kTiles>;
  extern __shared__ __align__(1024) std::byte shared[];
  let_next_kernel_start();  // which reads nothing before its own wait
  // While the kernel before this one still stores K and V: everything that does not look at the caches.
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const Layout layout = layout_of<S>(call.batch_size);
  Units<S> units(call, work, layout, shared);
  if (units.is_small() && warp == S::kWarps) [[likely]] {
    units.make_small();
  } else if (threadIdx.x == 32) {
    auto& facts = *reinterpret_cast<CallFacts*>(shared + layout.facts);
    facts.key_scale = call.k_cache.tensor_scale();
    facts.value_scale = call.v_cache.tensor_scale();
  } else if (threadIdx.x == 0) {
    // Every thread arrives for itself: racecheck does not see one lane arrive for its warp.
    init_barrier(shared_address(shared + layout.handed), S::kWorkers);
    init_barrier(shared_address(shared + layout.folded), S::kWorkers);
    Ring<S>(layout, shared).init(kHasTensorCopies && work.boxes);
  }
  if (units.is_small()) [[likely]] {
    __syncthreads();
  } else {
    units.make(reinterpret_cast<std::int32_t*>(shared + layout.exchange));
  }
  const auto first = static_cast<std::int32_t>(blockIdx.x);
  if (first >= units.total()) return;
  if (warp >= S::kWarps) {
    const bool of_values = warp > S::kWarps;
    const Copies<S> copies(call, work, of_values ? &maps.value : &maps.key, layout, shared, of_values);
    copy_units(units, copies, first, work, reinterpret_cast<std::int32_t*>(shared + layout.next));
  } else {
    WarpState<S> state{Ring<S>(layout, shared)};
    for (std::int32_t index = first; index >= 0;) {
      work_on<S>(call, work, shared, units.find(index), state);
      state.ring.wait_full();  // for the note of the next tile
      index = noted(state.ring.note().unit);
    }
  }
}

template <CacheType kType, int kHead, int kTiles>
cudaError_t launch_instance(const Call& call, const Work& work, const Maps& maps, cudaStream_t stream) {
  using S = Shape<kType, kHead, kTiles>;
  const auto kernel = decode<kType, kHead, kTiles>;
  // The same number for every call: the attribute is the kernel's, and other threads launch it too.
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           std::min(std::max(layout_of<S>(kMaxBatch).bytes, work.shared_least), work.shared_limit));
  if (error != cudaSuccess) return error;
  // Left to itself the driver holds back shared memory that a second block could use.
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  const auto bytes = static_cast<std::size_t>(std::max(layout_of<S>(call.batch_size).bytes, work.shared_least));
  return launch_early(call.scratch.overlaps, kernel, dim3(static_cast<unsigned>(work.blocks)), S::kThreads, bytes,
                      stream, call, work, maps);
}

}  // namespace octavo::cuda::decode
