#include "cuda/general/kernel.cuh"

namespace octavo::cuda {

cudaError_t launch_attention_float32(const Call& call, const Instance& instance, AttentionGrid grid,
                                     cudaStream_t stream) {
#define OCTAVO_FLOAT32_INSTANCE(bucket, row_count, keys, warps)                        \
  if (instance.head_bucket == bucket && instance.rows == row_count) {                  \
    return launch_instance<float, bucket, row_count, keys, warps>(call, grid, stream); \
  }
#include "cuda/general/instances.inc"
#undef OCTAVO_FLOAT32_INSTANCE
  return cudaErrorInvalidValue;
}

}  // namespace octavo::cuda
