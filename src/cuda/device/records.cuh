// A batch's lengths, checked: what every kernel of a call may trust.
#pragma once

#include <cstdint>

#include "cuda/call.h"

namespace octavo::cuda {

inline constexpr int kMaxWarps = 32;  // of a block

struct Maximum {
  __device__ std::int64_t operator()(std::int64_t a, std::int64_t b) const { return a > b ? a : b; }
};
struct Sum {
  __device__ std::int64_t operator()(std::int64_t a, std::int64_t b) const { return a + b; }
};

// The fold of this thread's value with those of all threads before it; `total` is that of all. All threads call it.
template <typename Fold>
__device__ inline std::int64_t scan(std::int64_t value, Fold fold, std::int64_t* of_warps, std::int64_t& total) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const std::int64_t before = __shfl_up_sync(0xffffffffu, value, step);
    if (lane >= step) value = fold(before, value);
  }
  if (lane == 31) of_warps[warp] = value;
  __syncthreads();
  if (warp == 0) {
    std::int64_t mine = of_warps[lane];  // past the last warp anything, which reaches no lane before it
#pragma unroll
    for (int step = 1; step < kMaxWarps; step *= 2) {
      const std::int64_t before = __shfl_up_sync(0xffffffffu, mine, step);
      if (lane >= step) mine = fold(before, mine);
    }
    of_warps[lane] = mine;
  }
  __syncthreads();
  if (warp > 0) value = fold(of_warps[warp - 1], value);
  total = of_warps[blockDim.x / 32 - 1];
  __syncthreads();  // of_warps is free again
  return value;
}

// A sequence whose lengths break the contract gets no tokens. `start` is where the sequences before it end at the
// latest.
template <typename Record>
__device__ inline Record make_record(const Call& call, std::int64_t begin, std::int64_t end, std::int64_t past,
                                     std::int64_t start) {
  Record record{};
  record.start = static_cast<std::int32_t>(start);
  const std::int64_t length = past + end - begin;
  constexpr std::int64_t kLongest = (std::int64_t{1} << 31) - kChunkKeys;  // positions are 32-bit in the kernels
  bool legal = begin == start && begin <= end && end <= call.token_count && past >= 0;
  legal = legal && length <= call.context_capacity && length <= kLongest;
  // With query_positions, reject_positions() looks at every token.
  if (call.cos != nullptr && call.positions == nullptr && end > begin)
    legal = legal && length <= call.rotary_max_positions;
  if (legal) {
    record.new_tokens = static_cast<std::int32_t>(end - begin);
    record.past = static_cast<std::int32_t>(past);
  }
  return record;
}

// By the first kernel of a call, one block of it.
__device__ inline void clear_counters(const Call& call) {
  for (int i = threadIdx.x; i < call.scratch.counter_count; i += static_cast<int>(blockDim.x))
    call.scratch.counters[i] = 0;
}

// Records of a batch of at most 32, a lane each; the other lanes have empty ones behind them. A warp calls it.
template <typename Record>
__device__ inline Record make_lane_record(const Call& call) {
  const int lane = threadIdx.x % 32;
  const bool inside = lane < call.batch_size;
  const std::int32_t begin = inside ? call.cumulative[lane] : 0;
  const std::int32_t end = inside ? call.cumulative[lane + 1] : 0;
  const std::int32_t past = inside ? call.past[lane] : 0;
  std::int32_t start = max(begin, 0);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const std::int32_t before = __shfl_up_sync(0xffffffffu, start, step);
    if (lane >= step) start = max(before, start);
  }
  if (inside) return make_record<Record>(call, begin, end, past, start);
  Record behind{};
  behind.start = call.token_count;
  return behind;
}

// Records of all sequences, and the start of one more behind them. All threads of a block, which has whole warps; ends
// with a barrier. `of_warps` has kMaxWarps numbers.
template <typename Record>
__device__ void make_records(const Call& call, Record* records, std::int64_t* of_warps) {
  if (call.batch_size < 32) {
    if (threadIdx.x < 32) {
      const Record mine = make_lane_record<Record>(call);
      if (static_cast<int>(threadIdx.x) <= call.batch_size) records[threadIdx.x] = mine;
    }
    __syncthreads();
    return;
  }
  std::int64_t highest = 0;  // of cumulative_sequence_length so far
  for (int base = 0; base < call.batch_size; base += static_cast<int>(blockDim.x)) {
    const int sequence = base + static_cast<int>(threadIdx.x);
    const bool inside = sequence < call.batch_size;
    const std::int64_t begin = inside ? call.cumulative[sequence] : 0;
    const std::int64_t end = inside ? call.cumulative[sequence + 1] : 0;
    const std::int64_t past = inside ? call.past[sequence] : 0;
    std::int64_t total = 0;
    const std::int64_t mine = scan(begin, Maximum{}, of_warps, total);
    if (inside) records[sequence] = make_record<Record>(call, begin, end, past, mine > highest ? mine : highest);
    highest = total > highest ? total : highest;
  }
  if (threadIdx.x == 0) {
    records[call.batch_size] = Record{};
    records[call.batch_size].start = call.token_count;
  }
  __syncthreads();
}

}  // namespace octavo::cuda
