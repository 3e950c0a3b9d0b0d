// Sizes of the general attention kernel's tiles, with the reason beside each number.
#pragma once

#include <cstdint>

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

// The instance for a Problem. Which one it is changes no bit of the result: only `rows` differs within a bucket.
inline Instance choose_instance(const Problem& problem) noexcept {
  const std::int64_t sequences = problem.batch_size > 0 ? problem.batch_size : 1;
  const std::int64_t bound = problem.max_query_len_bound * problem.group_size();
  const std::int64_t average = problem.token_count * problem.group_size() / sequences;
  const bool many_rows = (bound < average ? bound : average) >= kManyRows;
  Instance chosen{};
  const auto consider = [&](const Instance& instance) {
    if (instance.head_bucket < problem.head_size) return;
    const bool closer = chosen.head_bucket == 0 || instance.head_bucket < chosen.head_bucket;
    const bool larger = instance.head_bucket == chosen.head_bucket && instance.rows > chosen.rows && many_rows;
    if (closer || larger) chosen = instance;
  };
  if (problem.element_type == ElementType::kFloat32) {
    for (const Instance& instance : kFloat32Instances) consider(instance);
  } else {
    for (const Instance& instance : kTensorCoreInstances) consider(instance);
  }
  return chosen;
}

}  // namespace octavo::cuda
