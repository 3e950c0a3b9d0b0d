#include "cuda/general/kernel.cuh"

namespace octavo::cuda {

cudaError_t launch_attention_bfloat16(const Call& call, const Instance& instance, AttentionGrid grid,
                                      cudaStream_t stream) {
#define OCTAVO_TENSOR_CORE_INSTANCE(bucket, row_count, keys, warps)                            \
  if (instance.head_bucket == bucket && instance.rows == row_count) {                          \
    return launch_instance<__nv_bfloat16, bucket, row_count, keys, warps>(call, grid, stream); \
  }
#include "cuda/general/instances.inc"
#undef OCTAVO_TENSOR_CORE_INSTANCE
  return cudaErrorInvalidValue;
}

}  // namespace octavo::cuda
