#include "cuda/general/attention.h"

#include <algorithm>
#include <cstdint>

#include "contract/message.h"
#include "cuda/general/kernel.h"

namespace octavo::cuda {
namespace {

using contract::cat;

constexpr std::int64_t kMaxGridYz = 65535;
constexpr std::int64_t kMaxGridX = (std::int64_t{1} << 31) - 1;

// sum over sequences of ceil(rows / tile rows) <= all rows / tile rows + sequences with tokens
std::int64_t max_tiles(const Problem& problem, const Instance& instance) {
  return problem.token_count * problem.group_size() / instance.rows + std::min(problem.token_count, problem.batch_size);
}

std::int64_t max_split_tokens(const Problem& problem) {
  return std::min(problem.token_count, kMaxSplitTokens * problem.batch_size);
}

cudaError_t launch_attention(const Problem& problem, const Call& call, const Instance& instance, int shared_limit,
                             cudaStream_t stream) {
  const AttentionGrid grid{static_cast<unsigned>(max_tiles(problem, instance)),
                           static_cast<unsigned>(call.kv_num_heads), static_cast<unsigned>(call.scratch.chunks),
                           shared_limit};
  switch (call.element_type) {
    case ElementType::kFloat16: return launch_attention_float16(call, instance, grid, stream);
    case ElementType::kBFloat16: return launch_attention_bfloat16(call, instance, grid, stream);
    default: return launch_attention_float32(call, instance, grid, stream);
  }
}

}  // namespace

std::string refuse_grid(const Problem& problem) {
  if (problem.kv_num_heads <= kMaxGridYz) return {};
  return cat("kv_num_heads must be at most ", kMaxGridYz, " on CUDA, got ", problem.kv_num_heads);
}

std::string refuse_size(const Problem& problem, const DeviceFacts& facts) {
  const Instance instance = choose_instance(problem, facts.shared_memory);
  if (instance.rows == 0) {
    return cat("head_size = ", problem.head_size, " needs more shared memory than the ", facts.shared_memory,
               " bytes that a block of this device can have");
  }
  const std::int64_t tiles = max_tiles(problem, instance);
  const std::int64_t merge_rows = max_split_tokens(problem) * problem.num_heads;
  if (std::max(tiles, merge_rows) <= kMaxGridX) return {};
  return cat("token_count * num_heads must be at most about 2^31 on CUDA, got ", problem.token_count, " * ",
             problem.num_heads);
}

Status launch_general_attention(const Problem& problem, const Call& call, const Instance& instance,
                                const DeviceFacts& facts, cudaStream_t stream) noexcept {
  if (const cudaError_t error = launch_attention(problem, call, instance, facts.shared_memory, stream);
      error != cudaSuccess) {
    return to_status(error, "the launch of the attention kernel");
  }
  if (call.scratch.chunks <= 1) return {};
  return to_status(launch_merge(call, max_split_tokens(problem), stream), "the launch of the merge kernel");
}

}  // namespace octavo::cuda
