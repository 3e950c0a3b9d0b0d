// The general attention kernel: any feature, any cache type, any block size. Included once per element type.
#pragma once

#include <climits>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/device/codec.cuh"
#include "cuda/device/head_row.cuh"
#include "cuda/device/sequences.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/general/kernel.h"
#include "cuda/general/load_rows.cuh"
#include "cuda/general/products.cuh"
#include "cuda/general/shared_memory.h"
#include "cuda/launch.cuh"

namespace octavo::cuda {

// Per query row of the tile, in shared memory.
template <int kRows>
struct RowState {
  float maximum[kRows];     // of the scores so far
  float weight[kRows];      // sum of exp(score - maximum)
  float correction[kRows];  // what this key tile multiplies the sums so far by; at the end, the output's factor
  float scale[kRows];       // of q.k: softmax scale, K's PER_TENSOR scale, what the row of Q was divided by
  std::int32_t begin[kRows], end[kRows];  // KV positions that the row sees
  std::int32_t token[kRows];              // within the sequence's new tokens
  std::int32_t head[kRows];               // query head
};
static_assert(sizeof(RowState<16>) == kRowStateWords * 16 * 4);

template <typename T, int kBucket, int kRows, int kKeys, int kWarps>
struct Attention {
  static constexpr int kThreads = kWarps * 32;
  // Softmax: kLanes neighbouring threads share a row, kOwn keys each.
  static constexpr int kLanes = kThreads / kRows < kKeys / 4 ? kThreads / kRows : kKeys / 4;
  static constexpr int kOwn = kKeys / kLanes;
  // Codes of V are read along with K's where there are registers for both: not beside the sums of many rows.
  static constexpr bool kEarlyValues = kRows <= 16;
  static_assert(kRows * kLanes % 32 == 0 && kLanes <= 32 && kOwn % 4 == 0);
  static_assert(kWarps * sizeof(float) <= kKeys * sizeof(T), "load_query() has a row of floats a warp among the keys");
  using Products = std::conditional_t<std::is_same_v<T, float>, FloatProducts<kBucket, kRows, kKeys, kWarps>,
                                      TensorCoreProducts<T, kBucket, kRows, kKeys, kWarps>>;

  using Loader = RowLoader<T, kBucket, kKeys, kThreads>;

  const Call& call;
  const SharedLayout layout;
  T *query, *keys, *values, *weights;
  float* scores;
  std::int64_t *key_offsets, *value_offsets;  // [2][kKeys], by parity of the key tile
  RowState<kRows>& state;
  std::uint32_t (&live_keys)[2][2];  // bits of a key tile's keys that are seen and mapped, by parity
  std::int32_t (&hull)[2];           // first and one past the last position that some row sees

  int sequence = 0, kv_head = 0, rows = 0, chunk = 0, chunks = 1;
  SequenceRecord record{};
  bool split = false;
  std::int32_t key_begin = 0, key_end = 0;  // positions that this block walks
  PageEntry page;                           // of this thread's key in the key tile after the next
  Loader key_loader, value_loader;          // codes on their way from the caches
  Products products;

  __device__ Attention(const Call& call_, std::byte* shared)
      : call(call_),
        layout(shared_layout(sizeof(T), kRows, kKeys, call_.head_size, call_.v_head_size, call_.latent)),
        query(reinterpret_cast<T*>(shared + layout.query)),
        keys(reinterpret_cast<T*>(shared + layout.keys)),
        values(reinterpret_cast<T*>(shared + layout.values)),
        weights(reinterpret_cast<T*>(shared + layout.weights)),
        scores(reinterpret_cast<float*>(shared + layout.scores)),
        key_offsets(reinterpret_cast<std::int64_t*>(shared + layout.key_offsets)),
        value_offsets(reinterpret_cast<std::int64_t*>(shared + layout.value_offsets)),
        state(*reinterpret_cast<RowState<kRows>*>(shared + layout.row_state)),
        live_keys(*reinterpret_cast<std::uint32_t (*)[2][2]>(shared + layout.live_keys)),
        hull(*reinterpret_cast<std::int32_t (*)[2]>(shared + layout.hull)) {}

  // Which rows and which chunk of their keys this block has. False: none, the grid is an upper bound.
  __device__ bool find_work() {
    const SequenceRecord* records = call.scratch.records;
    const auto tile = static_cast<std::int64_t>(blockIdx.x);
    if (tile >= records[call.batch_size].tile_begin) return false;  // every warp finds the same
    sequence = warp_last_not_above(records, call.batch_size, &SequenceRecord::tile_begin, tile);
    kv_head = static_cast<int>(blockIdx.y);
    chunk = static_cast<int>(blockIdx.z);
    record = records[sequence];
    split = is_split(call, record);
    chunks = split ? chunks_of(call, record) : 1;
    if (chunk >= chunks) return false;

    // The last tiles of a causal prompt see the most keys: they start first.
    const std::int64_t all_rows = static_cast<std::int64_t>(record.new_tokens) * call.group;
    const std::int64_t tiles = (all_rows + kRows - 1) / kRows;
    const std::int64_t first_row = (tiles - 1 - (tile - record.tile_begin)) * kRows;
    rows = static_cast<int>(min(static_cast<std::int64_t>(kRows), all_rows - first_row));
    if (threadIdx.x == 0) {
      hull[0] = INT_MAX;
      hull[1] = 0;
    }
    __syncthreads();
    for (int row = threadIdx.x; row < kRows; row += kThreads) {
      KeyRange range{0, 0};
      if (row < rows) {
        const auto token = static_cast<std::int32_t>((first_row + row) / call.group);
        state.token[row] = token;
        state.head[row] = kv_head * call.group + static_cast<std::int32_t>((first_row + row) % call.group);
        range = visible(call, position_of(call, record, token), record.kv_length());
        if (range.begin < range.end) {
          atomicMin(&hull[0], range.begin);
          atomicMax(&hull[1], range.end);
        }
      }
      state.begin[row] = range.begin;
      state.end[row] = range.end;
      state.maximum[row] = -INFINITY;
      state.weight[row] = 0.0f;
    }
    __syncthreads();
    const std::int64_t length = chunk_keys(record.kv_length());
    const std::int64_t begin = split ? chunk * length : 0;
    const std::int64_t end = chunk + 1 == chunks ? record.kv_length() : begin + length;
    key_begin = static_cast<std::int32_t>(max(begin, static_cast<std::int64_t>(hull[0])));
    key_end = static_cast<std::int32_t>(min(end, static_cast<std::int64_t>(hull[1])));
    return true;
  }

  // Q, normalised and rotated, as T. A float16 row that is not Q as given (a rotation, a norm, scales of K's channels)
  // is divided by a power of two that puts its largest element just below 2^15, so that nothing over- or underflows.
  __device__ void load_query() {
    products.clear();
    const int lane = threadIdx.x % 32;
    const int width = call.head_size;
    const int padded = padded_width(sizeof(T), width);
    const bool altered = call.q_norm != nullptr || call.cos != nullptr || call.k_cache.per_channel;
    float* row_floats = reinterpret_cast<float*>(keys) + threadIdx.x / 32 * width;  // no keys are there yet
    for (int row = threadIdx.x / 32; row < kRows; row += kWarps) {
      T* to = query + row * layout.row_stride;
      if (row >= rows) {
        for (int c = lane; c < padded; c += 32) to[c] = from_float<T>(0.0f);
        continue;
      }
      const std::int64_t token = record.start + state.token[row];
      const T* from = reinterpret_cast<const T*>(call.query.row(token, state.head[row]));
      float power = 1.0f;
      if (!altered) {
        for (int c = lane; c < width; c += 32) to[c] = from[c];
      } else {
        for (int c = lane; c < width; c += 32) row_floats[c] = to_float(from[c]);
        prepare_rows<T>(call, call.q_norm, position_of(call, record, state.token[row]), 1, row_floats);
        float largest = 0.0f;
        for (int c = lane; c < width; c += 32) {
          const float x = row_floats[c] * call.k_cache.channel_scale(kv_head, c, width);
          row_floats[c] = x;
          largest = fmaxf(largest, fabsf(x));
        }
        if constexpr (std::is_same_v<T, __half>) {
          largest = warp_max(largest);
          if (largest > 0.0f && largest < INFINITY) power = exp2f(static_cast<float>(14 - ilogbf(largest)));
        }
        for (int c = lane; c < width; c += 32) to[c] = from_float<T>(row_floats[c] * power);
        __syncwarp();
      }
      for (int c = width + lane; c < padded; c += 32) to[c] = from_float<T>(0.0f);
      if (lane == 0) state.scale[row] = call.scale * call.k_cache.tensor_scale() / power;
    }
    __syncthreads();
  }

  // Starts to read the block-table entry of this thread's key in the tile at `base`: entries of seen positions only.
  __device__ void fetch_page(std::int32_t base) {
    if (threadIdx.x >= kKeys) return;
    const std::int32_t position = base + static_cast<std::int32_t>(threadIdx.x);
    bool seen = position >= key_begin && position < key_end;
    if (seen && call.window > 0 && call.positions != nullptr) {  // only then can the rows' ranges leave gaps
      bool any = false;
      for (int row = 0; row < rows; ++row) any = any || (position >= state.begin[row] && position < state.end[row]);
      seen = any;
    }
    page.fetch(call, sequence, position, seen);
  }

  // Says where the keys of the fetched tile are: an offset into the caches each, -1 for those that no row sees or whose
  // block is unmapped.
  __device__ void place_keys(int parity) {
    constexpr int kLookers = kKeys < 32 ? 32 : kKeys;
    if (threadIdx.x >= kLookers) return;
    const int key = static_cast<int>(threadIdx.x);
    const std::int64_t block = key < kKeys ? page.block(call) : -1;
    const std::uint32_t live = __ballot_sync(0xffffffffu, block >= 0);
    if (key % 32 == 0) live_keys[parity][key / 32] = live;
    if (key >= kKeys) return;
    key_offsets[parity * kKeys + key] = block >= 0 ? call.k_cache.offset(block, page.slot, kv_head) : -1;
    value_offsets[parity * kKeys + key] = block >= 0 ? call.v_cache.offset(block, page.slot, kv_head) : -1;
  }

  __device__ std::uint64_t live_of(int parity) const {
    return std::uint64_t{live_keys[parity][1]} << 32 | live_keys[parity][0];
  }

  // K of the next tile: copies or reads start once K has been used, narrow codes are stored after the softmax.
  __device__ void start_keys(int parity) {
    const std::int64_t* offsets = key_offsets + parity * kKeys;
    if (Loader::copies(call.k_cache)) {
      Loader::copy(call.k_cache, offsets, call.head_size, padded_width(sizeof(T), call.head_size), layout.row_stride,
                   keys);
    } else if (Loader::fetches(call.k_cache)) {
      key_loader.fetch(call.k_cache, offsets, call.head_size);
    }
  }
  __device__ void store_keys(int parity) {
    if (Loader::copies(call.k_cache)) return;
    key_loader.store(call.k_cache, key_offsets + parity * kKeys, live_of(parity), call.head_size,
                     padded_width(sizeof(T), call.head_size), layout.row_stride, keys);
  }

  // V of the next tile, or in LATENT its rows, which are K and V: reads start before the weighted sum, copies and
  // stores after it.
  __device__ void start_values(int parity) {
    const Cache& cache = call.latent ? call.k_cache : call.v_cache;
    if (Loader::copies(cache) || !Loader::fetches(cache)) return;
    value_loader.fetch(cache, (call.latent ? key_offsets : value_offsets) + parity * kKeys, call.head_size);
  }
  __device__ void store_values(int parity) {
    const Cache& cache = call.latent ? call.k_cache : call.v_cache;
    const std::int64_t* offsets = (call.latent ? key_offsets : value_offsets) + parity * kKeys;
    const int padded = padded_width(sizeof(T), call.head_size);
    if (Loader::copies(cache)) {
      Loader::copy(cache, offsets, call.head_size, padded, layout.value_stride, values);
    } else {
      value_loader.store(cache, offsets, live_of(parity), call.head_size, padded, layout.value_stride, values);
    }
  }

  // Index of (row, position) in output_qk; -1 where it has no such column.
  __device__ std::int64_t output_qk_index(int row, std::int32_t position) const {
    if (position >= call.max_context_len) return -1;
    const std::int64_t token = record.start + state.token[row];
    return (static_cast<std::int64_t>(state.head[row]) * call.token_count + token) * call.max_context_len + position;
  }

  __device__ void write_output_qk(int row, std::int32_t position, float x) const {
    const std::int64_t at = output_qk_index(row, position);
    if (at < 0) return;
    switch (call.output_qk_type) {
      case ElementType::kFloat16: static_cast<__half*>(call.output_qk)[at] = from_float<__half>(x); return;
      case ElementType::kBFloat16:
        static_cast<__nv_bfloat16*>(call.output_qk)[at] = from_float<__nv_bfloat16>(x);
        return;
      default: static_cast<float*>(call.output_qk)[at] = x; return;
    }
  }

  // Bit i: the row attends to key first + i of the tile at `base`.
  __device__ std::uint32_t attended_bits(std::int32_t base, int parity, int row, int first) const {
    const std::int32_t begin = max(state.begin[row] - base, 0);
    const std::int32_t end = min(state.end[row] - base, 64);
    if (begin >= end) return 0;
    const std::uint64_t seen = (~std::uint64_t{0} >> (64 - end)) & (~std::uint64_t{0} << begin);
    return static_cast<std::uint32_t>((seen & live_of(parity)) >> first);
  }

  // Scale and softcap for this thread's keys of a row, in place.
  __device__ void cap_scores(std::uint32_t attended, int row, float* own) const {
#pragma unroll 1
    for (int i = 0; i < kOwn; ++i) {
      if ((attended >> i & 1u) != 0) own[i] = call.softcap * tanhf(own[i] * state.scale[row] * call.inverse_softcap);
    }
  }

  // What the bias adds to them, all read at once: one after the other each would wait for device memory. 0 beyond its
  // capacity, where the contract leaves the caller nothing to ask for.
  __device__ void load_bias(std::int32_t position, std::uint32_t attended, int row, float (&bias)[kOwn]) const {
    const bool inside = state.token[row] < call.bias_query_capacity;
    const T* from = static_cast<const T*>(call.bias) + sequence * call.bias_batch_stride +
                    state.head[row] * call.bias_head_stride + state.token[row] * call.bias_context_capacity + position;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const bool read = inside && (attended >> i & 1u) != 0 && position + i < call.bias_context_capacity;
      bias[i] = read ? to_float(from[i]) : 0.0f;
    }
  }

  // s[i] = the logit of this thread's i-th key of a row, -inf where the row does not attend to it; to output_qk too
  // where that has scores.
  __device__ void read_logits(std::int32_t base, int parity, int row, int first, float (&s)[kOwn]) const {
    const std::uint32_t attended = attended_bits(base, parity, row, first);
    float bias[kOwn] = {};
    if (call.bias != nullptr) load_bias(base + first, attended, row, bias);
    float* const own = scores + row * layout.score_stride + first;
    float scale = state.scale[row];
    if (call.softcap > 0.0f) {
      cap_scores(attended, row, own);
      scale = 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kOwn; i += 4) {
      const float4 dots = *reinterpret_cast<const float4*>(own + i);
      s[i] = (attended >> i & 1u) != 0 ? __fadd_rn(dots.x * scale, bias[i]) : -INFINITY;
      s[i + 1] = (attended >> (i + 1) & 1u) != 0 ? __fadd_rn(dots.y * scale, bias[i + 1]) : -INFINITY;
      s[i + 2] = (attended >> (i + 2) & 1u) != 0 ? __fadd_rn(dots.z * scale, bias[i + 2]) : -INFINITY;
      s[i + 3] = (attended >> (i + 3) & 1u) != 0 ? __fadd_rn(dots.w * scale, bias[i + 3]) : -INFINITY;
    }
    if (call.qk_output != QkOutput::kScores) return;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) own[i] = s[i];
#pragma unroll 1
    for (int i = 0; i < kOwn; ++i) {
      if ((attended >> i & 1u) != 0) write_output_qk(row, base + first + i, own[i]);
    }
  }

  // Scores become weights exp(score - maximum), as T, and each row's state is brought up to date. The tree of the sum
  // is the same for any kLanes.
  __device__ void weigh(std::int32_t base, int parity) {
    const int row = static_cast<int>(threadIdx.x) / kLanes;
    if (row >= kRows) return;
    const int first = static_cast<int>(threadIdx.x) % kLanes * kOwn;
    float s[kOwn];
    read_logits(base, parity, row, first, s);
    float highest = s[0];
#pragma unroll
    for (int i = 1; i < kOwn; ++i) highest = fmaxf(highest, s[i]);
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, step));

    const float before = state.maximum[row];
    const float weight_before = state.weight[row];
    const float maximum = fmaxf(before, highest);
    const float reference = reference_of(maximum);
    float sums[kOwn / 4];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) s[i] = exponential<T>(s[i] - reference);
#pragma unroll
    for (int i = 0; i < kOwn / 4; ++i) sums[i] = (s[4 * i] + s[4 * i + 1]) + (s[4 * i + 2] + s[4 * i + 3]);
#pragma unroll
    for (int step = 1; step < kOwn / 4; step *= 2) {
#pragma unroll
      for (int i = 0; i + step < kOwn / 4; i += 2 * step) sums[i] += sums[i + step];
    }
    float total = sums[0];
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) total += __shfl_xor_sync(0xffffffffu, total, step);

    T* to = weights + row * layout.weight_stride + first;
#pragma unroll
    for (int i = 0; i < kOwn; i += 2) {
      if constexpr (sizeof(T) == 2) {
        *reinterpret_cast<std::uint32_t*>(to + i) = pack<T>(s[i], s[i + 1]);
      } else {
        *reinterpret_cast<float2*>(to + i) = make_float2(s[i], s[i + 1]);
      }
    }
    __syncwarp();  // the row's other lanes have read its state
    if (first == 0) {
      const float correction = before == maximum ? 1.0f : exponential<T>(before - reference);
      state.maximum[row] = maximum;
      state.weight[row] = weight_before * correction + total;
      state.correction[row] = correction;
    }
  }

  // All key tiles that some row sees; the next tile's loads are under way while one is worked on. `again` is the second
  // pass of output_qk = probabilities: the scores once more, now that each row's maximum and denominator are known.
  __device__ void walk_keys(bool again) {
    std::int32_t next = key_begin / kKeys * kKeys;  // the tile whose loads start in this round
    bool started = false;                           // the one before it is there to work on
    fetch_page(next);
    for (int parity = 0;; parity ^= 1) {
      const std::int32_t base = next - kKeys;
      const bool more = next < key_end;
      if (started) {
        // K is there.
        if (call.latent) {
          wait_copies<0>();
        } else {
          wait_copies<1>();
        }
        __syncthreads();
        Products::score(layout, query, keys, padded_width(sizeof(T), call.head_size), rows, scores);
      }
      if (more) {
        place_keys(parity);
        fetch_page(next + kKeys);
      }
      __syncthreads();
      // K has been used.
      const bool load_values = more && (call.latent || !again);
      if (more && !call.latent) start_keys(parity);
      if (load_values && kEarlyValues) start_values(parity);
      commit_copies();
      if (started && again) write_probabilities(base, parity ^ 1);
      if (started && !again) weigh(base, parity ^ 1);
      if (more && !call.latent) store_keys(parity);
      if (!call.latent) wait_copies<1>();
      __syncthreads();
      // V and the weights are there.
      if (load_values && !kEarlyValues) start_values(parity);
      if (started && !again) products.accumulate(layout, weights, values, call.v_head_size, rows, state.correction);
      __syncthreads();
      // V has been used.
      if (load_values) store_values(parity);
      commit_copies();
      if (!more) break;
      next += kKeys;
      started = true;
    }
  }

  // Output and LSE of whole rows; sums and state of a chunk's.
  __device__ void finish() {
    const bool whole = chunks == 1;
    for (int row = threadIdx.x; row < rows; row += kThreads) {
      const std::int64_t head = state.head[row];
      if (!whole) {
        call.scratch.states[chunk_index(row)] = make_float2(state.maximum[row], state.weight[row]);
        continue;
      }
      const T* sink = call.sink != nullptr ? static_cast<const T*>(call.sink) + head : nullptr;
      const RowEnd end = end_row(state.maximum[row], state.weight[row], sink);
      state.correction[row] = end.factor;
      if (call.lse != nullptr) call.lse[head * call.token_count + record.start + state.token[row]] = end.lse;
    }
    __syncthreads();
    const float tensor_scale = call.v_cache.tensor_scale();
    products.for_each([&](int row, int channel, float sum) {
      if (row >= rows || channel >= call.v_head_size) return;
      if (!whole) {
        call.scratch.sums[chunk_index(row) * call.v_head_size + channel] = sum;
        return;
      }
      const float scale =
          state.correction[row] * tensor_scale * call.v_cache.channel_scale(kv_head, channel, call.head_size);
      const std::int64_t token = record.start + state.token[row];
      const std::int64_t at = (token * call.num_heads + state.head[row]) * call.v_head_size + channel;
      static_cast<T*>(call.output)[at] = from_float<T>(state.weight[row] != 0.0f ? sum * scale : 0.0f);
    });
  }

  __device__ std::int64_t chunk_index(int row) const {
    const std::int64_t split_token = record.split_begin + state.token[row];
    return (split_token * call.num_heads + state.head[row]) * call.scratch.chunks + chunk;
  }

  __device__ void write_probabilities(std::int32_t base, int parity) const {
    const int row = static_cast<int>(threadIdx.x) / kLanes;
    if (row >= rows) return;
    const int first = static_cast<int>(threadIdx.x) % kLanes * kOwn;
    float s[kOwn];
    read_logits(base, parity, row, first, s);
    const float reference = reference_of(state.maximum[row]);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (s[i] == -INFINITY) continue;  // output_qk holds zeros already
      write_output_qk(row, base + first + i, exponential<T>(s[i] - reference) * state.correction[row]);
    }
  }
};

// Blocks that an SM should hold at once: more of them hide more latency, until the registers that are left to each cost
// more in spills. A bucket of 64 is fastest with 96 registers (float16 64/8x64 4096x32 took 152 us with 80).
constexpr int min_blocks(int bucket, int warps) {
  if (bucket > 128) return 1;
  return warps == 8 ? 2 : bucket == 64 ? 5 : 4;
}

template <typename T, int kBucket, int kRows, int kKeys, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, min_blocks(kBucket, kWarps)) attend(const __grid_constant__ Call call) {
  extern __shared__ __align__(16) std::byte shared[];
  Attention<T, kBucket, kRows, kKeys, kWarps> attention(call, shared);
  if (!attention.find_work()) return;
  attention.load_query();
  const int passes = call.qk_output == QkOutput::kProbabilities ? 2 : 1;
  for (int pass = 0; pass < passes; ++pass) {
    attention.walk_keys(pass == 1);
    if (pass == 0) attention.finish();
  }
}

template <typename T, int kBucket, int kRows, int kKeys, int kWarps>
cudaError_t launch_instance(const Call& call, AttentionGrid grid, cudaStream_t stream) {
  const auto kernel = attend<T, kBucket, kRows, kKeys, kWarps>;
  const int shared = shared_layout(sizeof(T), kRows, kKeys, call.head_size, call.v_head_size, call.latent).bytes;
  // The same number for every call: the attribute is the kernel's, and other threads launch it too.
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, grid.shared_limit);
  if (error != cudaSuccess) return error;
  // Left to itself the driver holds back shared memory that more blocks could use.
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(grid.tiles, grid.kv_heads, grid.chunks), kWarps * 32, static_cast<std::size_t>(shared),
                stream, call);
}

}  // namespace octavo::cuda
