#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "contract/message.h"
#include "cuda/backend.h"
#include "cuda/call.h"
#include "cuda/general/kernel.h"
#include "cuda/general/shared_memory.h"
#include "cuda/general/tuning.h"
#include "cuda/prologue/kernel.h"
#include "cuda/runtime.h"
#include "cuda/schedule/kernel.h"

namespace octavo::cuda {
namespace {

using contract::cat;

constexpr int kMinComputeCapability = 80;  // bfloat16 tensor cores and asynchronous copies
constexpr std::int64_t kMaxGridX = (std::int64_t{1} << 31) - 1;
constexpr std::int64_t kMaxGridYz = 65535;

// sum over sequences of ceil(rows / tile rows) <= all rows / tile rows + sequences with tokens
std::int64_t max_tiles(const Problem& problem, const Instance& instance) {
  return problem.token_count * problem.group_size() / instance.rows + std::min(problem.token_count, problem.batch_size);
}

std::int64_t max_split_tokens(const Problem& problem) {
  return std::min(problem.token_count, kMaxSplitTokens * problem.batch_size);
}

std::string refuse(const Problem& problem) {
  if (problem.kv_num_heads > kMaxGridYz) {
    return cat("kv_num_heads must be at most ", kMaxGridYz, " on CUDA, got ", problem.kv_num_heads);
  }
  const std::int64_t tiles = max_tiles(problem, choose_instance(problem));
  const std::int64_t merge_rows = max_split_tokens(problem) * problem.num_heads;
  if (std::max(tiles, merge_rows) <= kMaxGridX) return {};
  return cat("token_count * num_heads must be at most about 2^31 on CUDA, got ", problem.token_count, " * ",
             problem.num_heads);
}

std::string refuse_device(const Problem& problem, int device_ordinal) {
  DeviceFacts facts;
  if (std::string reason = read_device(device_ordinal, facts); !reason.empty()) return reason;
  if (facts.compute_capability < kMinComputeCapability) {
    return cat("needs a device of compute capability 8.0, device ", device_ordinal, " has ",
               facts.compute_capability / 10, ".", facts.compute_capability % 10);
  }
  const Instance instance = choose_instance(problem);
  const int bytes = shared_layout(static_cast<int>(size_in_bytes(problem.element_type)), instance.rows, instance.keys,
                                  static_cast<int>(problem.head_size), static_cast<int>(problem.v_head_size),
                                  problem.cache_layout == CacheLayout::kLatent)
                        .bytes;
  if (bytes <= facts.shared_memory) return {};
  return cat("head_size = ", problem.head_size, " needs ", bytes, " bytes of shared memory, device ", device_ordinal,
             " has ", facts.shared_memory);
}

std::size_t workspace_bytes(const Problem& problem, int /*concurrency*/) {
  Scratch scratch;
  return carve(problem, nullptr, scratch);
}

cudaError_t launch_attention(const Problem& problem, const Call& call, const Instance& instance, cudaStream_t stream) {
  const AttentionGrid grid{static_cast<unsigned>(max_tiles(problem, instance)),
                           static_cast<unsigned>(call.kv_num_heads), static_cast<unsigned>(call.scratch.chunks)};
  switch (call.element_type) {
    case ElementType::kFloat16: return launch_attention_float16(call, instance, grid, stream);
    case ElementType::kBFloat16: return launch_attention_bfloat16(call, instance, grid, stream);
    default: return launch_attention_float32(call, instance, grid, stream);
  }
}

// Work on the stream only: nothing is allocated, nothing waits, and every size comes from the Problem.
Status run(const Problem& problem, const Arguments& arguments, Workspace workspace, int /*concurrency*/,
           const RunContext& context) noexcept {
  if (problem.token_count == 0) return {};
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const Instance instance = choose_instance(problem);
  Scratch scratch;
  carve(problem, workspace.data, scratch);
  scratch.tile_rows = instance.rows;
  const Call call = make_call(problem, arguments, scratch);

  if (const cudaError_t error = launch_schedule(call, stream); error != cudaSuccess) {
    return to_status(error, "the launch of the schedule kernel");
  }
  if (const cudaError_t error = launch_prologue(call, stream); error != cudaSuccess) {
    return to_status(error, "the launch of the prologue kernel");
  }
  if (call.output_qk != nullptr) {
    const auto bytes =
        static_cast<std::size_t>(arguments.output_qk.element_count()) * size_in_bytes(problem.output_qk_type);
    if (const cudaError_t error = cudaMemsetAsync(call.output_qk, 0, bytes, stream); error != cudaSuccess) {
      return to_status(error, "the clearing of output_qk");
    }
  }
  if (problem.batch_size == 0) return {};
  if (const cudaError_t error = launch_attention(problem, call, instance, stream); error != cudaSuccess) {
    return to_status(error, "the launch of the attention kernel");
  }
  if (call.scratch.chunks > 1) {
    return to_status(launch_merge(call, max_split_tokens(problem), stream), "the launch of the merge kernel");
  }
  return {};
}

}  // namespace

const dispatch::Backend kGeneralBackend = {
    "cuda_general",
    "Streaming attention on tensor cores (float32: on ordinary ones) for the whole contract.",
    DeviceKind::kCuda,
    FeatureSet::all(),
    refuse,
    workspace_bytes,
    run,
    refuse_device};

}  // namespace octavo::cuda
