// Sizes of the general attention kernel's tiles, with the reason beside each number.
#pragma once

#include <cstdint>
#include <iterator>

#include "cuda/general/shared_memory.h"
#include "octavo/problem.h"

namespace octavo::cuda {

// One compiled kernel: heads of up to `head_bucket` channels, `rows` query rows (tokens x heads of a KV group) that
// share each tile of `keys` keys, in `warps` warps.
struct Instance {
  int head_bucket, rows, keys, warps;
};

// What limits each row: `rows` is one tensor-core tile (16) where a step has few rows, else as many as the accumulators
// of 8 warps hold in about 64 registers (128 at a bucket of 1024). `keys` is 64, less where K and V would not fit.
inline constexpr Instance kTensorCoreInstances[] = {
#define OCTAVO_TENSOR_CORE_INSTANCE(head_bucket, rows, keys, warps) {head_bucket, rows, keys, warps},
#include "cuda/general/instances.inc"
#undef OCTAVO_TENSOR_CORE_INSTANCE
};

// float32: one block size for all, since every product goes through the ordinary pipes.
inline constexpr Instance kFloat32Instances[] = {
#define OCTAVO_FLOAT32_INSTANCE(head_bucket, rows, keys, warps) {head_bucket, rows, keys, warps},
#include "cuda/general/instances.inc"
#undef OCTAVO_FLOAT32_INSTANCE
};

// Averages below this many rows a sequence leave a larger tile mostly empty.
inline constexpr std::int64_t kManyRows = 32;

inline int shared_bytes(const Problem& problem, const Instance& instance) noexcept {
  return shared_layout(static_cast<int>(size_in_bytes(problem.element_type)), instance.rows, instance.keys,
                       static_cast<int>(problem.head_size), static_cast<int>(problem.v_head_size),
                       problem.cache_layout == CacheLayout::kLatent)
      .bytes;
}

// The instance for a Problem where a block can have `shared_memory` bytes; without rows if none fits. The smallest
// bucket, then the longest key tiles that fit with any number of rows: on one device a head size has one length of
// tile, and the choice among rows changes no bit of the result.
inline Instance choose_instance(const Problem& problem, int shared_memory) noexcept {
  const bool is_float32 = problem.element_type == ElementType::kFloat32;
  const Instance* const begin = is_float32 ? std::begin(kFloat32Instances) : std::begin(kTensorCoreInstances);
  const Instance* const end = is_float32 ? std::end(kFloat32Instances) : std::end(kTensorCoreInstances);
  const std::int64_t sequences = problem.batch_size > 0 ? problem.batch_size : 1;
  const std::int64_t bound = problem.max_query_len_bound * problem.group_size();
  const std::int64_t average = problem.token_count * problem.group_size() / sequences;
  const bool many_rows = (bound < average ? bound : average) >= kManyRows;
  Instance chosen{};
  for (const Instance* instance = begin; instance != end; ++instance) {
    if (instance->head_bucket < problem.head_size || shared_bytes(problem, *instance) > shared_memory) continue;
    const bool first = chosen.rows == 0;
    const bool closer = instance->head_bucket < chosen.head_bucket;
    const bool same = instance->head_bucket == chosen.head_bucket;
    const bool longer = same && instance->keys > chosen.keys;
    const bool taller = same && instance->keys == chosen.keys && instance->rows > chosen.rows && many_rows;
    if (first || closer || longer || taller) chosen = *instance;
  }
  return chosen;
}

}  // namespace octavo::cuda
