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

// visible() of sequences.cuh in 32 bits, which hold any position and the one behind it.
__device__ inline KeyRange keys_seen(const Call& call, const Work& work, std::int32_t position,
                                     std::int32_t kv_length) {
  const std::int32_t end = call.causal ? min(position + 1, kv_length) : kv_length;
  const std::int32_t begin = work.window > 0 ? max(position + 1 - work.window, 0) : 0;
  return {min(begin, end), end};
}

// The keys that some row of a sequence sees: segments are counted from `begin`, which is a multiple of kWindowKeys.
// None for sequences with too many new tokens, which are left to the general attention.
struct Keys {
  std::int32_t begin = 0, end = 0;
  __device__ std::int32_t count() const { return end - begin; }
};

__device__ inline Keys keys_of(const Call& call, const Work& work, const SequenceSpan& record) {
  if (record.new_tokens == 0 || record.new_tokens > call.scratch.decode_tokens) return {};
  const KeyRange first = keys_seen(call, work, record.past, record.kv_length());
  return {first.begin & -kWindowKeys, record.kv_length()};
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
        facts_(*reinterpret_cast<CallFacts*>(shared + layout.facts)),
        full_(reinterpret_cast<std::int32_t*>(shared + layout.full_units)),
        tail_(reinterpret_cast<std::int32_t*>(shared + layout.tail_units)),
        base_(reinterpret_cast<std::int32_t*>(shared + layout.partial_base)),
        order_(reinterpret_cast<std::int32_t*>(shared + layout.tail_order)),
        keys_(reinterpret_cast<std::int32_t*>(shared + layout.keys)),
        width_(reinterpret_cast<std::int32_t*>(shared + layout.width)),
        spans_(reinterpret_cast<SequenceSpan*>(shared + layout.spans)) {}

  // Large batches: all threads of the block; ends with a barrier. `scratch` has kScratch words.
  static constexpr int kWarps = S::kThreads / 32;
  static constexpr int kScratch = std::max(kCandidates + 2 * kWarps, 2 * kMaxWarps);
  static_assert(kScratch <= S::kExchangeRows * S::kExchangeStride);
  __device__ void make(std::int32_t* scratch) {
    make_records(call_, spans_, reinterpret_cast<std::int64_t*>(scratch));
    read_lengths();
    const int shift = choose_run(scratch);
    const std::int32_t full = count_units(shift, scratch);
    sort_tails(shift, full, scratch);
  }

  // Batches of up to 32: by one warp, a lane a sequence. A barrier has to follow.
  __device__ void make_small() {
    const int lane = threadIdx.x % 32;
    const bool inside = lane < call_.batch_size;
    const SequenceSpan span = lane_span();
    const std::int32_t keys = keys_of(call_, work_, span).count();
    const std::int32_t width = keys > 0 ? row_tiles(span) * work_.head_groups : 0;
    std::int32_t units = 0;
    const int choice = choose_small(keys, width, units);
    const int shift = run_shift(choice, keys);
    const std::int32_t runs = runs_of(keys, shift);
    const std::int32_t rest = tail(keys, shift);
    const std::int32_t full = (keys >> shift) * width;
    const std::int32_t full_before = sum_of_lanes_before(full);
    const std::int32_t partials_before = sum_of_lanes_before(runs > 1 ? runs * width : 0);
    // The shorter ones last, longest first; where each unit has a block of its own, as they come.
    std::int32_t tail_units = rest > 0 ? width : 0;
    int rank = lane;
    if (units > work_.blocks) [[unlikely]] {
      rank = 0;
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        const std::int32_t other = __shfl_sync(0xffffffffu, rest, j);
        rank += static_cast<int>(other > rest || (other == rest && j < lane));
      }
      if (inside) tail_[rank] = tail_units;
      __syncwarp();
      tail_units = inside ? tail_[lane] : 0;
      __syncwarp();
    }
    const std::int32_t tail_before = sum_of_lanes_before(tail_units);
    if (inside) {
      spans_[lane] = span;
      full_[lane] = full_before;
      base_[lane] = partials_before;
      order_[rank] = lane;
      tail_[lane] = tail_before;
    }
    if (lane == 31) {
      facts_.run_shift = choice;
      facts_.full_units = full_before + full;
      facts_.units = full_before + full + tail_before + tail_units;
    }
  }

  // Whether make_small(), by one warp, does all of make()'s work.
  __device__ bool is_small() const {
    return call_.batch_size <= 32;
  }

  __device__ std::int32_t total() const {
    return facts_.units;
  }

  // The same for all threads of a warp, which all call it.
  __device__ Unit find(std::int32_t index) const {
    const bool full = index < facts_.full_units;
    const std::int32_t* const before = full ? full_ : tail_;
    if (!full) index -= facts_.full_units;
    const int at = last_not_above(before, call_.batch_size, index);
    return unit_of(full ? at : order_[at], full, index - before[at]);
  }

 private:
  // `within`: of the sequence's units over whole runs, or of those over the shorter one.
  __device__ Unit unit_of(int sequence, bool full, std::int32_t within) const {
    Unit unit;
    unit.sequence = sequence;
    unit.span = spans_[sequence];
    const Keys keys = keys_of(call_, work_, unit.span);
    const int shift = run_shift(facts_.run_shift, keys.count());
    const std::int32_t tiles = row_tiles(unit.span);
    unit.stride = tiles * work_.head_groups;
    unit.runs = runs_of(keys.count(), shift);
    const std::int32_t tile = work_.by_head_groups.of(within);  // of all runs
    unit.head_group = within - tile * work_.head_groups;
    // There are few partial results: the quotient is exact.
    unit.run = !full || unit.runs == 1
                   ? unit.runs - 1
                   : __float2int_rz(__fdividef(static_cast<float>(tile) + 0.5f, static_cast<float>(tiles)));
    unit.row_tile = !full ? tile : tile - unit.run * tiles;
    const std::int32_t before = unit.runs > 1 ? unit.run << shift : 0;
    unit.begin = keys.begin + before;
    unit.end = unit.runs > 1 && keys.count() - before > 1 << shift ? unit.begin + (1 << shift) : keys.end;
    const std::int32_t place = unit.row_tile * work_.head_groups + unit.head_group;
    unit.partial = unit.runs > 1 ? base_[sequence] + unit.run * unit.stride + place : -1;
    return unit;
  }

  // The last of `count` ascending numbers that is not above `value`; the first is 0. By a warp, 32 numbers at a time.
  __device__ static int last_not_above(const std::int32_t* numbers, int count, std::int32_t value) {
    static_assert(kMaxBatch <= 32 * 32);
    const int lane = threadIdx.x % 32;
    int low = 0;
    if (count > 32) low = 32 * last_of_lanes(lane * 32 < count && numbers[lane * 32] <= value);
    return low + last_of_lanes(low + lane < count && numbers[low + lane] <= value);
  }
  __device__ static int last_of_lanes(bool holds) {
    return __popc(__ballot_sync(0xffffffffu, holds)) - 1;
  }

  __device__ std::int32_t row_tiles(const SequenceSpan& record) const {
    return (record.new_tokens * call_.group + S::kRows - 1) / S::kRows;
  }
  __device__ int segment_of(std::int32_t keys) const {
    return segment_shift(keys, work_.window > 0);
  }
  __device__ int run_shift(int shift, std::int32_t keys) const {
    return max(shift, segment_of(keys));
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

  // ---- batches of up to 32 ----

  // make_lane_record(), with less to do where sequences start in order, as they should: each then is the highest start
  // so far.
  __device__ SequenceSpan lane_span() const {
    const int lane = threadIdx.x % 32;
    const bool inside = lane < call_.batch_size;
    const std::int32_t begin = inside ? call_.cumulative[lane] : 0;
    const std::int32_t end = inside ? call_.cumulative[lane + 1] : 0;
    const std::int32_t past = inside ? call_.past[lane] : 0;
    const std::int32_t start = max(begin, 0);
    const std::int32_t before = __shfl_up_sync(0xffffffffu, start, 1);
    if (!__all_sync(0xffffffffu, lane == 0 || !inside || before <= start)) [[unlikely]]
      return make_lane_record<SequenceSpan>(call_);
    return inside ? make_record<SequenceSpan>(call_, begin, end, past, start) : SequenceSpan{};
  }

  __device__ static std::int32_t sum_of_lanes_before(std::int32_t x) {
    std::int32_t sum = x;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const std::int32_t before = __shfl_up_sync(0xffffffffu, sum, step);
      if (static_cast<int>(threadIdx.x) % 32 >= step) sum += before;
    }
    return sum - x;
  }

  // The shift of the run; `units`: how many there are then, as far as it matters. The candidates do not wait for each
  // other: a lane weighs each.
  __device__ int choose_small(std::int32_t keys, std::int32_t width, std::int32_t& units) const {
    constexpr std::int64_t kMost = 2047;  // units of a sequence; 32 times as many fit 16 bits
    static_assert(kPartials < kMost);
    const int lane = threadIdx.x % 32;
    const std::int32_t longest = __reduce_max_sync(0xffffffffu, keys);
    const auto segments = static_cast<std::uint32_t>(min(std::int64_t{keys} * width >> kSegmentShift, kManyKeys));
    const float keys_in_all = static_cast<float>(__reduce_add_sync(0xffffffffu, segments)) * (1 << kSegmentShift);
    std::uint32_t mine = 0;  // of this lane's candidate: partial results, and in the upper half units without
#pragma unroll
    for (int c = 0; c < kCandidates; ++c) {
      const std::int32_t runs = runs_of(keys, run_shift(candidate(c), keys));
      const auto all = static_cast<std::uint32_t>(min(std::int64_t{runs} * width, kMost));
      const std::uint32_t sum = __reduce_add_sync(0xffffffffu, runs > 1 ? all : all << 16);
      if (lane == c) mine = sum;
    }
    const auto partials = static_cast<std::int32_t>(mine & 0xffffu);
    const std::int32_t all = partials + static_cast<std::int32_t>(mine >> 16);
    const float cost = lane < kCandidates ? cost_of(candidate(lane), all, partials, longest, keys_in_all) : INFINITY;
    const std::uint32_t least = __reduce_min_sync(0xffffffffu, __float_as_uint(cost));  // costs are positive
    const int best = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, __float_as_uint(cost) == least))) - 1;
    units = __shfl_sync(0xffffffffu, all, best);
    return least < __float_as_uint(INFINITY) ? candidate(best) : kNoSplit;
  }

  // ---- larger ones: all threads ----

  __device__ void read_lengths() {
    for (int s = threadIdx.x; s < call_.batch_size; s += S::kThreads) {
      const SequenceSpan record = spans_[s];
      keys_[s] = keys_of(call_, work_, record).count();
      width_[s] = row_tiles(record) * work_.head_groups;
    }
    __syncthreads();
  }

  // The shift of the run that should finish first: units times their length, shared out to the blocks. Each warp works
  // out what some of the candidates cost.
  __device__ int choose_run(std::int32_t* scratch) {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    for (int c = warp; c < kCandidates; c += kWarps) {
      const float cost = cost_of(candidate(c), lane);
      if (lane == 0) scratch[c] = __float_as_int(cost);
    }
    __syncthreads();
    int shift = kNoSplit;  // what is left when there is no room for partial results
    float least = INFINITY;
#pragma unroll
    for (int c = 0; c < kCandidates; ++c) {
      const float cost = __int_as_float(scratch[c]);
      if (!(cost < least)) continue;
      least = cost;
      shift = candidate(c);
    }
    __syncthreads();
    return shift;
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
      const std::int32_t runs = runs_of(keys, run_shift(shift, keys));
      const auto all = static_cast<std::int32_t>(min(std::int64_t{runs} * width_[s], kManyUnits));
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
    const int run = run_shift(shift, longest);
    const auto unit = static_cast<float>(longest >> run > 0 ? 1 << run : longest);
    const auto waves = static_cast<float>(work_.by_blocks.of(units + work_.blocks - 1));
    return fminf(waves * unit, __fdividef(keys_in_all, static_cast<float>(work_.blocks)) + unit) +
           waves * kKeysToStart + (partials > 0 ? kKeysToFold : 0.0f);
  }

  // Prefix sums over the sequences of their units over whole runs, and of their partial results. Returns how many of
  // the former there are.
  __device__ std::int32_t count_units(int run, std::int32_t* scratch) {
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
        const int shift = run_shift(run, keys);
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
    return carry_full;
  }

  // The shorter last runs, longest first; in a large batch as they come, since there is enough else to even out. What
  // is known of all units is noted.
  __device__ void sort_tails(int shift, std::int32_t full, std::int32_t* scratch) {
    const int batch = call_.batch_size;
    const int own = min(static_cast<int>(threadIdx.x), batch - 1);
    const bool sorted = __syncthreads_or(static_cast<int>(keys_[own] != keys_[0])) != 0 && batch <= S::kThreads;
    for (int s = threadIdx.x; s < batch; s += S::kThreads) {
      int rank = s;
      if (sorted) {
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
    if (threadIdx.x == 0) {
      facts_.run_shift = shift;
      facts_.full_units = full;
      facts_.units = full + carry;
    }
    __syncthreads();
  }

  static constexpr int kNoSplit = 31;
  // More units than any choice can want, and more of 512 keys: sums of kMaxBatch, and of 32, fit 32 bits.
  static constexpr std::int64_t kManyUnits = 1 << 20, kManyKeys = 1 << 26;
  static constexpr float kKeysToStart = 192.0f;
  static constexpr float kKeysToFold = 256.0f;

  const Call& call_;
  const Work& work_;
  CallFacts& facts_;
  // Units over whole runs of the sequences before a sequence; units over the shorter ones ahead of the k-th in their
  // order; that order; partial results before a sequence.
  std::int32_t *const full_, *const tail_, *const base_, *const order_;
  std::int32_t *const keys_, *const width_;
  SequenceSpan* const spans_;
};

}  // namespace octavo::cuda::decode
