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

// A working warp: some keys of every tile, for one KV head.
template <CacheType kType, int kHead, int kTiles>
struct Worker : Results<kType, kHead, kTiles> {
  using Base = Results<kType, kHead, kTiles>;
  using Rows = typename Base::Rows;
  using P = Products<kType, kHead, kTiles>;
  using S = typename Rows::S;
  using C = typename Rows::C;
  using Item = typename Base::Item;
  using Base::exchanged;
  using Base::exchanged_state;
  using Base::fold_item;
  using Base::has_item;
  using Base::item;
  using Base::sync_workers;
  using Base::unit;
  using Base::work;
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
  static constexpr int kKeyTiles = P::kKeyTiles;
  static constexpr int kChannelTiles = P::kChannelTiles;
  static constexpr int kRowTiles = S::kWarpTiles;
  static constexpr std::uint32_t kAllKeys = S::kKeys == 32 ? 0xffffffffu : 0xffffu;
  // Weights of zero do not clear these types' NaN and infinities.
  static constexpr bool kHasNan = S::kWide || kType == CacheType::kFloat8E4M3FN;

  const int lane;
  const int head, first_tile, group;  // of the unit's heads, of the head's rows (eights), of the warps for these
  Ring<S> ring;
  const std::uint32_t key_lane, value_lane;  // where in a slot this lane reads operands of K and of V

  std::int32_t all_see_from = 0, all_see_to = 0;  // keys that every row of the unit sees

  std::uint32_t query[S::kQueryInRegisters ? S::kSteps : 1][kRowTiles][2];
  float sums[kChannelTiles][kRowTiles][4];
  float maximum[kRowTiles][2], weight[kRowTiles][2], scale[kRowTiles][2];
  float limit[kRowTiles][2];   // scores above it move the maximum
  float bias[kRowTiles][2];    // what scores start from
  std::uint32_t segments = 0;  // that this warp has handed over

  __device__ Worker(const Call& call_, const Work& work_, std::byte* shared_)
      : Base(call_, work_, shared_),
        lane(static_cast<int>(threadIdx.x) % 32),
        head(static_cast<int>(threadIdx.x) / 32 / (S::kGroups * S::kSplit)),
        first_tile(static_cast<int>(threadIdx.x) / 32 / S::kGroups % S::kSplit * kRowTiles),
        group(static_cast<int>(threadIdx.x) / 32 % S::kGroups),
        ring(layout, shared_),
        key_lane(static_cast<std::uint32_t>(P::key_operand(head, group * S::kKeys, lane))),
        value_lane(static_cast<std::uint32_t>(P::value_operand(head, group * S::kKeys, lane))) {}

  // ---- the unit ----

  // Its facts, and Q as fragments in shared memory. All working warps; a barrier has to follow.
  __device__ void prepare(const Unit& unit_) {
    unit = unit_;
    record = unit.span;
    first_head = unit.head_group * S::kHeads;
    heads = min(S::kHeads, call.kv_num_heads - first_head);
    first_row = unit.row_tile * S::kRows;
    rows = min(S::kRows, record.new_tokens * call.group - first_row);
    // Positions ascend with the tokens: the first and the last bound what all see.
    const KeyRange first = range_of(0);
    const KeyRange last = range_of(record.new_tokens - 1);
    all_see_from = max(first.begin, last.begin);
    all_see_to = min(min(first.end, last.end), unit.end);
    this->with_element_type([this](auto zero) { this->template prepare_query<decltype(zero)>(); });
  }

  __device__ std::uint32_t query_word(int step, int tile, int reg) const {
    return this->template at<std::uint32_t>(
        layout.query)[((head * kTiles + first_tile + tile) * S::kSteps + step) * 64 + lane * 2 + reg];
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
        scale[tile][j] = this->template at<float>(layout.row_scale)[row_of(tile, j)];
        bias[tile][j] = kCodeBias<kType> != 0 ? this->template at<float>(layout.row_bias)[row_of(tile, j)] : 0.0f;
      }
    }
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
    return head * S::kRows + (first_tile + tile) * 8 + lane % 4 * 2 + j;
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
        const float of_tanh = scale[tile][j] * call.inverse_softcap;  // tanh's argument times log2(e)
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

  // Sums and weights so far are brought to a new maximum where a score is far above the old one. "Far" is 2^8: weights
  // stay far below float16's largest number, and after the first step of a segment few scores are.
  __device__ void raise_maximum(const float (&s)[kKeyTiles][kRowTiles][4], bool capped) {
    constexpr float kFar = 8.0f;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float top = -INFINITY;
#pragma unroll
        for (int k = 0; k < kKeyTiles; ++k) top = fmaxf(top, fmaxf(s[k][tile][j], s[k][tile][j + 2]));
#pragma unroll
        for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
        if (!(top > limit[tile][j])) top = maximum[tile][j];
        const float unit_scale = capped ? 1.0f : scale[tile][j];
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

  __device__ void raise_if_far(const float (&s)[kKeyTiles][kRowTiles][4], bool capped) {
    bool grew = false;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int k = 0; k < kKeyTiles; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) grew = grew || s[k][tile][i] > limit[tile][i % 2];
      }
    }
    if (__any_sync(0xffffffffu, grew)) [[unlikely]]
      raise_maximum(s, capped);
  }

  // Scores to weights.
  template <bool kMasked>
  __device__ void weigh(const float (&s)[kKeyTiles][kRowTiles][4], bool capped,
                        std::uint32_t (&p)[kKeyTiles][kRowTiles][2]) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      float shift[2], factor[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        factor[j] = capped ? 1.0f : scale[tile][j];
        shift[j] = maximum[tile][j] == -INFINITY ? 0.0f : maximum[tile][j] * factor[j];
      }
#pragma unroll
      for (int k = 0; k < kKeyTiles; ++k) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] = exp2_approximate(fmaf(s[k][tile][i], factor[i % 2], -shift[i % 2]));
          if constexpr (kMasked) x[i] = s[k][tile][i] == -INFINITY ? 0.0f : x[i];
          weight[tile][i % 2] += x[i];
        }
        p[k][tile][0] = transpose(pack<C>(x[0], x[1]));
        p[k][tile][1] = transpose(pack<C>(x[2], x[3]));
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

  __device__ void do_tile(std::int32_t base) {
    const bool capped = call.softcap > 0.0f;
    ring.wait_full();
    const std::uint32_t live = noted(ring.note().live[group * S::kKeys / 32]) >> group * S::kKeys % 32 & kAllKeys;
    float s[kKeyTiles][kRowTiles][4];
    std::uint32_t loaded = P::multiply_keys(
        ring.slot() + key_lane, [&](int step, int tile, int reg) { return query_at(step, tile, reg); }, bias, s);
    release(loaded | live);
    if (capped) [[unlikely]]
      cap(s);
    std::uint32_t p[kKeyTiles][kRowTiles][2];
    const bool whole = live == kAllKeys && base >= all_see_from && base + S::kKeys <= all_see_to;
    if (!whole) [[unlikely]]
      hide(base, live, s);
    raise_if_far(s, capped);
    if (whole) [[likely]] {
      weigh<false>(s, capped, p);
    } else {
      weigh<true>(s, capped, p);
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
    release(loaded);
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
        const float factor = call.softcap > 0.0f ? 1.0f : scale[tile][j];
        if (lane < 4) {
          exchanged_state(group, row) =
              make_float2(maximum[tile][j] == -INFINITY ? -INFINITY : maximum[tile][j] * factor, all);
        }
        if (is_row(row)) {
          float* const mine = exchanged(group, row);
#pragma unroll
          for (int c = 0; c < kChannelTiles; ++c) {
            mine[value_channel<kType>(c, r)] = sums[c][tile][j];
            mine[value_channel<kType>(c, r + 8)] = sums[c][tile][j + 2];
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
        do_tile(base + group * S::kKeys);
        if (waiting) [[unlikely]]
          fold_segment(index - 1, false);
        waiting = false;
      }
      hand_over();
    }
    if (index > 0) fold_segment(index - 1, true);
  }

  __device__ int segment_shift_of() const {
    return segment_shift(keys_of(call, record).count(), call.window > 0);
  }

  // The unit's Q has been prepared.
  __device__ void run() {
    sync_workers();
    load_query();
    walk();
    this->merge_if_last();
  }

  // The unit of the next tile; negative if there is none.
  __device__ std::int32_t next_unit() const {
    ring.wait_full();
    return noted(ring.note().unit);
  }

  // A word of a slot's note: read by the lane that releases the slot.
  template <typename Word>
  __device__ Word noted(const Word& word) const {
    Word read{};
    if (lane == 0) read = word;
    return __shfl_sync(0xffffffffu, read, 0);
  }
};

// What the two warps that copy do. `next`: a word in shared memory that they share.
template <typename Units, typename Copies>
__device__ inline void copy_units(const Units& units, Copies copies, std::int32_t index, const Work& work,
                                  std::int32_t* next) {
  while (index < units.total()) {
    copies.start(units.find(index), index);
    wait_for_earlier_kernels();
    copies.send();
    if (units.total() <= static_cast<std::int32_t>(gridDim.x)) break;
    sync_threads<64>(2);
    if (!Copies::kIsValue && threadIdx.x % 32 == 0) {
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
  const Layout layout = layout_of<S>(call.batch_size);
  if (threadIdx.x == 0) {
    // Every thread arrives for itself: racecheck does not see one lane arrive for its warp.
    init_barrier(shared_address(shared + layout.handed), S::kWorkers);
    init_barrier(shared_address(shared + layout.folded), S::kWorkers);
    Ring<S>(layout, shared).init(kHasTensorCopies && work.boxes);
  }
  Units<S> units(call, work, layout, shared);
  units.make(reinterpret_cast<std::int32_t*>(shared + layout.exchange));
  __syncthreads();
  const auto first = static_cast<std::int32_t>(blockIdx.x);
  if (first >= units.total()) return;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp == S::kWarps) {
    copy_units(units, Copies<kType, kHead, kTiles, false>(call, work, maps.key, layout, shared), first, work,
               reinterpret_cast<std::int32_t*>(shared + layout.next));
  } else if (warp > S::kWarps) {
    copy_units(units, Copies<kType, kHead, kTiles, true>(call, work, maps.value, layout, shared), first, work,
               reinterpret_cast<std::int32_t*>(shared + layout.next));
  } else {
    Worker<kType, kHead, kTiles> worker(call, work, shared);
    for (std::int32_t index = first; index >= 0; index = worker.next_unit()) {
      worker.prepare(units.find(index));
      wait_for_earlier_kernels();
      worker.run();
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
