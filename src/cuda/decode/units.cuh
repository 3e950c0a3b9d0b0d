// Who does what: every block works out the same list of units of work from the lengths in device memory.
//
// A unit is a row tile of one sequence and one group of KV heads, over an aligned run of the sequence's segments. The
// run's length is chosen from the whole batch, so that the units fill the device evenly; it changes no bit of the
// result (tree.cuh). Units over whole runs come first, the shorter ones behind them, longest first.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cuda/decode/shape.h"
#include "cuda/device/records.cuh"
#include "cuda/device/sequences.cuh"

namespace octavo::cuda::decode {

// The keys that some row of a sequence sees: segments are counted from `begin`, which is a multiple of kWindowKeys.
// None for sequences with too many new tokens, which are left to the general attention.
struct Keys {
  std::int32_t begin = 0, end = 0;
  __device__ std::int32_t count() const { return end - begin; }
};

__device__ inline Keys keys_of(const Call& call, const SequenceSpan& record) {
  if (record.new_tokens == 0 || record.new_tokens > call.scratch.decode_tokens) return {};
  const KeyRange first = visible(call, record.past, record.kv_length());
  return {first.begin / kWindowKeys * kWindowKeys, record.kv_length()};
}

inline constexpr std::uint32_t kNoBlock = 0xffffffffu;

struct Unit {
  SequenceSpan span;  // of the sequence
  std::int32_t sequence, row_tile, head_group;
  std::int32_t begin, end;  // keys
  std::int32_t run, runs;   // which of the sequence's runs
  std::int32_t partial;     // where its result goes; -1: the unit has the whole sequence
  std::int32_t stride;      // between the partial results of consecutive runs
};

template <typename S>
class Units {
 public:
  static constexpr int kCandidates = 9;  // runs of 512, 1,024, ... 131,072 keys

  __device__ Units(const Call& call, const Work& work, const Layout& layout, std::byte* shared)
      : call_(call),
        work_(work),
        full_(reinterpret_cast<std::int32_t*>(shared + layout.full_units)),
        tail_(reinterpret_cast<std::int32_t*>(shared + layout.tail_units)),
        base_(reinterpret_cast<std::int32_t*>(shared + layout.partial_base)),
        order_(reinterpret_cast<std::int32_t*>(shared + layout.tail_order)),
        keys_(reinterpret_cast<std::int32_t*>(shared + layout.keys)),
        width_(reinterpret_cast<std::int32_t*>(shared + layout.width)),
        spans_(reinterpret_cast<SequenceSpan*>(shared + layout.spans)) {}

  // All threads of the block. `scratch` has kScratch words.
  static constexpr int kWarps = S::kThreads / 32;
  static constexpr int kScratch = std::max(kCandidates + 2 * kWarps, 2 * kMaxWarps);
  static_assert(kScratch <= S::kGroups * S::kAllRows * S::kExchangeStride);
  __device__ void make(std::int32_t* scratch) {
    if (is_small()) {
      make_small();
      return;
    }
    make_records(call_, spans_, reinterpret_cast<std::int64_t*>(scratch));
    read_lengths();
    choose_run(scratch);
    count_units(scratch);
    sort_tails(scratch);
    full_total_ = full_[call_.batch_size];
    total_ = full_total_ + tail_[call_.batch_size];
  }

  __device__ std::int32_t total() const { return total_; }

  // The same for all threads of a warp, which all call it.
  __device__ Unit find(std::int32_t index) const {
    const bool full = index < full_total_;
    if (is_small()) {
      const std::int32_t within = (full ? index : index - full_total_) - (full ? mine_.full_before : mine_.tail_before);
      const bool found = within >= 0 && within < (full ? mine_.full : mine_.tail);
      const int owner = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, found))) - 1;
      SequenceSpan span;
      span.start = __shfl_sync(0xffffffffu, mine_.span.start, owner);
      span.new_tokens = __shfl_sync(0xffffffffu, mine_.span.new_tokens, owner);
      span.past = __shfl_sync(0xffffffffu, mine_.span.past, owner);
      const std::int32_t partials_before = __shfl_sync(0xffffffffu, mine_.partials_before, owner);
      return unit_of(owner, span, full, __shfl_sync(0xffffffffu, within, owner), partials_before);
    }
    const int batch = call_.batch_size;
    if (full) {
      const int sequence = last_not_above(full_, batch, index);
      return unit_of(sequence, spans_[sequence], true, index - full_[sequence], base_[sequence]);
    }
    const int k = last_not_above(tail_, batch, index - full_total_);
    const int sequence = order_[k];
    return unit_of(sequence, spans_[sequence], false, index - full_total_ - tail_[k], base_[sequence]);
  }

 private:
  // `within`: of the sequence's units over whole runs, or of those over the shorter one.
  __device__ Unit unit_of(int sequence, const SequenceSpan& span, bool full, std::int32_t within,
                          std::int32_t partials_before) const {
    Unit unit;
    unit.sequence = sequence;
    unit.span = span;
    const Keys keys = keys_of(call_, span);
    const int shift = run_shift(keys.count());
    unit.stride = row_tiles(span) * work_.head_groups;
    unit.runs = runs_of(keys.count(), shift);
    unit.run = full ? within / unit.stride : unit.runs - 1;
    const std::int32_t place = full ? within - unit.run * unit.stride : within;
    unit.row_tile = place / work_.head_groups;
    unit.head_group = place - unit.row_tile * work_.head_groups;
    const std::int32_t before = unit.runs > 1 ? unit.run << shift : 0;
    unit.begin = keys.begin + before;
    unit.end = unit.runs > 1 && keys.count() - before > 1 << shift ? unit.begin + (1 << shift) : keys.end;
    unit.partial = unit.runs > 1 ? partials_before + unit.run * unit.stride + place : -1;
    return unit;
  }

  // ---- small batches: a lane of each warp has a sequence, and no warp needs another ----

  __device__ bool is_small() const { return call_.batch_size <= 32; }

  __device__ static std::int32_t sum_of_lanes_before(std::int32_t x) {
    std::int32_t sum = x;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const std::int32_t before = __shfl_up_sync(0xffffffffu, sum, step);
      if (static_cast<int>(threadIdx.x) % 32 >= step) sum += before;
    }
    return sum - x;
  }

  __device__ void make_small() {
    const int lane = threadIdx.x % 32;
    mine_.span = make_lane_record<SequenceSpan>(call_);
    const std::int32_t keys = keys_of(call_, mine_.span).count();
    const std::int32_t width = keys > 0 ? row_tiles(mine_.span) * work_.head_groups : 0;
    const std::int32_t longest = __reduce_max_sync(0xffffffffu, keys);
    float keys_in_all = static_cast<float>(keys) * static_cast<float>(width);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) keys_in_all += __shfl_xor_sync(0xffffffffu, keys_in_all, step);
    shift_ = 31;
    float least = INFINITY;
    for (int c = 0; c < kCandidates; ++c) {
      const std::int32_t runs = runs_of(keys, max(candidate(c), segment_of(keys)));
      const auto all = static_cast<std::int32_t>(min(std::int64_t{runs} * width, kMany));
      const std::int32_t units = __reduce_add_sync(0xffffffffu, all);
      const std::int32_t partials = __reduce_add_sync(0xffffffffu, runs > 1 ? all : 0);
      const float cost = cost_of(candidate(c), units, partials, longest, keys_in_all);
      if (cost < least) {
        least = cost;
        shift_ = candidate(c);
      }
      if (partials == 0) break;  // longer runs are the same
    }
    const int shift = run_shift(keys);
    const std::int32_t runs = runs_of(keys, shift);
    const std::int32_t rest = tail(keys, shift);
    mine_.full = (keys >> shift) * width;
    mine_.full_before = sum_of_lanes_before(mine_.full);
    mine_.partials_before = sum_of_lanes_before(runs > 1 ? runs * width : 0);
    mine_.tail = rest > 0 ? width : 0;
    // Longest first; none is before itself.
    mine_.tail_before = 0;
    for (int j = 0; j < call_.batch_size; ++j) {
      const std::int32_t other = __shfl_sync(0xffffffffu, rest, j);
      const std::int32_t units = __shfl_sync(0xffffffffu, mine_.tail, j);
      if (other > rest || (other == rest && j < lane)) mine_.tail_before += units;
    }
    full_total_ = __reduce_add_sync(0xffffffffu, mine_.full);
    total_ = full_total_ + __reduce_add_sync(0xffffffffu, mine_.tail);
  }

  // ---- larger ones: tables in shared memory ----

  __device__ std::int32_t row_tiles(const SequenceSpan& record) const {
    return (record.new_tokens * call_.group + S::kRows - 1) / S::kRows;
  }

  __device__ int segment_of(std::int32_t keys) const {
    return segment_shift(keys, call_.window > 0);
  }
  __device__ int run_shift(std::int32_t keys) const {
    return max(shift_, segment_of(keys));
  }

  // The last of `count` ascending numbers that is not above `value`; the first is 0.
  __device__ static int last_not_above(const std::int32_t* numbers, int count, std::int32_t value) {
    int low = 0;
    int high = count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (numbers[middle] <= value) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }

  // Runs of 2^shift keys; 31 makes one of any length.
  static __device__ std::int32_t runs_of(std::int32_t keys, int shift) {
    return (keys >> shift) + (static_cast<std::int32_t>(static_cast<std::uint32_t>(keys) << (32 - shift)) != 0);
  }
  static __device__ std::int32_t tail(std::int32_t keys, int shift) {
    return keys - (keys >> shift << shift);
  }

  static __device__ int candidate(int c) {
    return kSegmentShift + c;
  }

  __device__ void read_lengths() {
    for (int s = threadIdx.x; s < call_.batch_size; s += S::kThreads) {
      const SequenceSpan record = spans_[s];
      keys_[s] = keys_of(call_, record).count();
      width_[s] = row_tiles(record) * work_.head_groups;
    }
    __syncthreads();
  }

  // The run that should finish first: units times their length, shared out to the blocks. Each warp works out what some
  // of the candidates cost.
  __device__ void choose_run(std::int32_t* scratch) {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    for (int c = warp; c < kCandidates; c += kWarps) {
      const float cost = cost_of(candidate(c), lane);
      if (lane == 0) scratch[c] = __float_as_int(cost);
    }
    __syncthreads();
    shift_ = 31;  // no sequence is split: what is left when there is no room for partial results
    float least = INFINITY;
#pragma unroll
    for (int c = 0; c < kCandidates; ++c) {
      const float cost = __int_as_float(scratch[c]);
      if (!(cost < least)) continue;
      least = cost;
      shift_ = candidate(c);
    }
    __syncthreads();
  }

  // In keys, of runs of 2^shift. By a warp.
  __device__ float cost_of(int shift, int lane) const {
    std::int32_t units = 0;
    std::int32_t partials = 0;
    std::int32_t longest = 0;
    float keys_in_all = 0.0f;
    for (int s = lane; s < call_.batch_size; s += 32) {
      const std::int32_t keys = keys_[s];
      if (keys == 0) continue;
      const std::int32_t runs = runs_of(keys, max(shift, segment_of(keys)));
      const auto all = static_cast<std::int32_t>(min(std::int64_t{runs} * width_[s], kMany));
      units += all;
      partials += runs > 1 ? all : 0;
      keys_in_all += static_cast<float>(keys) * static_cast<float>(width_[s]);
      longest = max(longest, keys);
    }
    units = __reduce_add_sync(0xffffffffu, units);
    partials = __reduce_add_sync(0xffffffffu, partials);
    longest = __reduce_max_sync(0xffffffffu, longest);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) keys_in_all += __shfl_xor_sync(0xffffffffu, keys_in_all, step);
    return cost_of(shift, units, partials, longest, keys_in_all);
  }

  // Infinite if there is no room for the partial results. Either every wave takes as long as the longest unit, or the
  // units even out but for the last. A unit costs as much as some keys to start, a partial result some more to fold.
  __device__ float cost_of(int shift, std::int32_t units, std::int32_t partials, std::int32_t longest,
                           float keys_in_all) const {
    if (partials > work_.partials) return INFINITY;
    const auto blocks = static_cast<float>(work_.blocks);
    const auto unit =
        static_cast<float>(min(std::int64_t{1} << max(shift, segment_of(longest)), std::int64_t{longest}));
    const float waves = ceilf(static_cast<float>(units) / blocks);
    return fminf(waves * unit, keys_in_all / blocks + unit) + waves * kKeysToStart +
           (partials > 0 ? kKeysToFold : 0.0f);
  }

  // Prefix sums over the sequences of their units over whole runs, and of their partial results.
  __device__ void count_units(std::int32_t* scratch) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    std::int32_t carry_full = 0;
    std::int32_t carry_partial = 0;
    for (int first = 0; first < call_.batch_size; first += S::kThreads) {
      const int s = first + static_cast<int>(threadIdx.x);
      std::int32_t full = 0;
      std::int32_t partial = 0;
      if (s < call_.batch_size) {
        const std::int32_t keys = keys_[s];
        const int shift = run_shift(keys);
        const std::int32_t runs = runs_of(keys, shift);
        full = (keys >> shift) * width_[s];
        partial = runs > 1 ? runs * width_[s] : 0;
        keys_[s] = tail(keys, shift);  // what is left to sort
      }
      std::int32_t full_sum = full;
      std::int32_t partial_sum = partial;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const std::int32_t full_before = __shfl_up_sync(0xffffffffu, full_sum, step);
        const std::int32_t partial_before = __shfl_up_sync(0xffffffffu, partial_sum, step);
        if (lane >= step) {
          full_sum += full_before;
          partial_sum += partial_before;
        }
      }
      if (lane == 31) {
        scratch[2 * warp] = full_sum;
        scratch[2 * warp + 1] = partial_sum;
      }
      __syncthreads();
      std::int32_t full_all = 0;
      std::int32_t partial_all = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        if (w == warp) {
          full_sum += full_all;
          partial_sum += partial_all;
        }
        full_all += scratch[2 * w];
        partial_all += scratch[2 * w + 1];
      }
      if (s < call_.batch_size) {
        full_[s] = carry_full + full_sum - full;
        base_[s] = carry_partial + partial_sum - partial;
      }
      carry_full += full_all;
      carry_partial += partial_all;
      __syncthreads();
    }
    if (threadIdx.x == 0) full_[call_.batch_size] = carry_full;
  }

  // The shorter last runs, longest first; in a large batch as they come, since there is enough else to even out.
  __device__ void sort_tails(std::int32_t* scratch) {
    const int batch = call_.batch_size;
    for (int s = threadIdx.x; s < batch; s += S::kThreads) {
      int rank = s;
      if (batch <= S::kThreads) {
        const std::int32_t mine = keys_[s];
        rank = 0;
        for (int j = 0; j < batch; ++j) rank += keys_[j] > mine || (keys_[j] == mine && j < s);
      }
      order_[rank] = s;
    }
    __syncthreads();
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    std::int32_t carry = 0;
    for (int first = 0; first < batch; first += S::kThreads) {
      const int k = first + static_cast<int>(threadIdx.x);
      std::int32_t units = 0;
      if (k < batch && keys_[order_[k]] > 0) units = width_[order_[k]];
      std::int32_t sum = units;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const std::int32_t before = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += before;
      }
      if (lane == 31) scratch[warp] = sum;
      __syncthreads();
      std::int32_t all = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        if (w == warp) sum += all;
        all += scratch[w];
      }
      if (k < batch) tail_[k] = carry + sum - units;
      carry += all;
      __syncthreads();
    }
    if (threadIdx.x == 0) tail_[batch] = carry;
    __syncthreads();
  }

  static constexpr std::int64_t kMany = 1 << 20;  // more units than any choice can want; sums of kMaxBatch fit 32 bits
  static constexpr float kKeysToStart = 192.0f;
  static constexpr float kKeysToFold = 256.0f;

  const Call& call_;
  const Work& work_;
  std::int32_t *full_, *tail_, *base_, *order_, *keys_, *width_;
  SequenceSpan* const spans_;
  struct LaneUnits {
    SequenceSpan span;
    std::int32_t full, full_before, tail, tail_before, partials_before;
  };
  LaneUnits mine_{};  // of a small batch
  std::int32_t shift_ = 0, full_total_ = 0, total_ = 0;
};

}  // namespace octavo::cuda::decode
