#include <algorithm>
#include <cstdint>

#include "cuda/device/overlap.cuh"
#include "cuda/device/records.cuh"
#include "cuda/device/sequences.cuh"
#include "cuda/launch.cuh"
#include "cuda/schedule/kernel.h"

namespace octavo::cuda {
namespace {

constexpr int kMaxThreads = 1024;

__device__ void reject_positions(const Call& call) {
  for (int token = threadIdx.x; token < call.token_count; token += static_cast<int>(blockDim.x)) {
    const std::int64_t position = call.positions[token];
    if (position >= 0 && (call.cos == nullptr || position < call.rotary_max_positions)) continue;
    const int found = last_not_above(call.scratch.records, call.batch_size, &SequenceRecord::start, token);
    const int owner = owner_if(call, found, token);
    if (owner >= 0) call.scratch.records[owner].rejected = 1;
  }
}

// One block walks the batch, as many sequences at a time as it has threads.
__global__ void __launch_bounds__(kMaxThreads) schedule(const __grid_constant__ Call call) {
  __shared__ std::int64_t of_warps[kMaxWarps];
  SequenceRecord* records = call.scratch.records;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  clear_counters(call);

  make_records(call, records, of_warps);

  // Positions.
  __syncthreads();
  if (call.positions != nullptr) reject_positions(call);
  __syncthreads();

  // Row tiles and split tokens, counted up.
  std::int64_t tiles = 0;
  std::int64_t split_tokens = 0;
  for (int base = 0; base < call.batch_size; base += static_cast<int>(blockDim.x)) {
    const int sequence = base + static_cast<int>(threadIdx.x);
    SequenceRecord record{};
    if (sequence < call.batch_size) {
      record = records[sequence];
      if (record.rejected != 0) record.new_tokens = 0;
    }
    const bool tiled = record.new_tokens > call.scratch.decode_tokens;
    const std::int64_t rows = tiled ? static_cast<std::int64_t>(record.new_tokens) * call.group : 0;
    const std::int64_t own_tiles = (rows + call.scratch.tile_rows - 1) / call.scratch.tile_rows;
    const std::int64_t own_tokens = tiled && is_split(call, record) ? record.new_tokens : 0;
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
  // A small batch needs few: barriers between many warps are most of what this kernel costs.
  constexpr std::int32_t kMinThreads = 128;
  const std::int32_t wanted = call.positions != nullptr ? kMaxThreads : (call.batch_size + 31) / 32 * 32;
  const auto threads = static_cast<unsigned>(std::clamp(wanted, kMinThreads, kMaxThreads));
  return launch_early(call.scratch.overlaps, schedule, dim3(1), threads, 0, stream, call);
}

bool schedule_waits(int compute_capability) noexcept {
  constexpr int kFirstArchitecture = 90;
  if (compute_capability < kFirstArchitecture) return false;
  if (compute_capability < 100) return true;  // code for 9.0a is always in the library
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, schedule) == cudaSuccess && attributes.ptxVersion >= kFirstArchitecture;
}

}  // namespace octavo::cuda
