#include <cstdint>

#include "cuda/device/sequences.cuh"
#include "cuda/launch.cuh"
#include "cuda/schedule/kernel.h"

namespace octavo::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

struct Maximum {
  __device__ std::int64_t operator()(std::int64_t a, std::int64_t b) const { return a > b ? a : b; }
};
struct Sum {
  __device__ std::int64_t operator()(std::int64_t a, std::int64_t b) const { return a + b; }
};

// The fold of this thread's value with those of all threads before it; `total` is that of all. All threads call it.
template <typename Fold>
__device__ std::int64_t scan(std::int64_t value, Fold fold, std::int64_t* of_warps, std::int64_t& total) {
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
    std::int64_t mine = of_warps[lane];
#pragma unroll
    for (int step = 1; step < kWarps; step *= 2) {
      const std::int64_t before = __shfl_up_sync(0xffffffffu, mine, step);
      if (lane >= step) mine = fold(before, mine);
    }
    of_warps[lane] = mine;
  }
  __syncthreads();
  if (warp > 0) value = fold(of_warps[warp - 1], value);
  total = of_warps[kWarps - 1];
  __syncthreads();  // of_warps is free again
  return value;
}

// A sequence whose lengths break the contract gets no tokens. `start` is where the sequences before it end at the
// latest.
__device__ SequenceRecord make_record(const Call& call, int sequence, std::int64_t start) {
  SequenceRecord record{};
  record.start = static_cast<std::int32_t>(start);
  const std::int64_t begin = call.cumulative[sequence];
  const std::int64_t end = call.cumulative[sequence + 1];
  const std::int64_t past = call.past[sequence];
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

__device__ void reject_positions(const Call& call) {
  for (int token = threadIdx.x; token < call.token_count; token += kThreads) {
    const std::int64_t position = call.positions[token];
    if (position >= 0 && (call.cos == nullptr || position < call.rotary_max_positions)) continue;
    const int found = last_not_above(call.scratch.records, call.batch_size, &SequenceRecord::start, token);
    const int owner = owner_if(call, found, token);
    if (owner >= 0) call.scratch.records[owner].rejected = 1;
  }
}

// One block walks the batch, kThreads sequences at a time.
__global__ void __launch_bounds__(kThreads) schedule(const __grid_constant__ Call call) {
  __shared__ std::int64_t of_warps[kWarps];
  SequenceRecord* records = call.scratch.records;

  // Lengths, against the largest of cumulative_sequence_length so far.
  std::int64_t highest = 0;
  for (int base = 0; base < call.batch_size; base += kThreads) {
    const int sequence = base + static_cast<int>(threadIdx.x);
    const bool inside = sequence < call.batch_size;
    std::int64_t total = 0;
    const std::int64_t mine = scan(inside ? call.cumulative[sequence] : 0, Maximum{}, of_warps, total);
    if (inside) records[sequence] = make_record(call, sequence, mine > highest ? mine : highest);
    highest = total > highest ? total : highest;
  }

  // Positions.
  __syncthreads();
  if (call.positions != nullptr) reject_positions(call);
  __syncthreads();

  // Row tiles and split tokens, counted up.
  std::int64_t tiles = 0;
  std::int64_t split_tokens = 0;
  for (int base = 0; base < call.batch_size; base += kThreads) {
    const int sequence = base + static_cast<int>(threadIdx.x);
    SequenceRecord record{};
    if (sequence < call.batch_size) {
      record = records[sequence];
      if (record.rejected != 0) record.new_tokens = 0;
    }
    const std::int64_t rows = static_cast<std::int64_t>(record.new_tokens) * call.group;
    const std::int64_t own_tiles = (rows + call.scratch.tile_rows - 1) / call.scratch.tile_rows;
    const std::int64_t own_tokens = is_split(call, record) ? record.new_tokens : 0;
    std::int64_t total_tiles = 0;
    std::int64_t total_tokens = 0;
    const std::int64_t tiles_after = tiles + scan(own_tiles, Sum{}, of_warps, total_tiles);
    const std::int64_t tokens_after = split_tokens + scan(own_tokens, Sum{}, of_warps, total_tokens);
    if (sequence < call.batch_size) {
      record.tile_begin = static_cast<std::int32_t>(tiles_after - own_tiles);
      record.split_begin = static_cast<std::int32_t>(tokens_after - own_tokens);
      records[sequence] = record;
    }
    tiles += total_tiles;
    split_tokens += total_tokens;
  }
  if (threadIdx.x == 0) {
    SequenceRecord end{};
    end.start = call.token_count;
    end.tile_begin = static_cast<std::int32_t>(tiles);
    end.split_begin = static_cast<std::int32_t>(split_tokens);
    records[call.batch_size] = end;
  }
}

}  // namespace

cudaError_t launch_schedule(const Call& call, cudaStream_t stream) {
  return launch(schedule, dim3(1), kThreads, 0, stream, call);
}

}  // namespace octavo::cuda
