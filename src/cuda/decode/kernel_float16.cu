#include "cuda/decode/kernel.cuh"

namespace octavo::cuda::decode {

#define OCTAVO_DECODE_FLOAT16
#define OCTAVO_DECODE_INSTANCE(type, head, tiles)                                                           \
  template cudaError_t launch_instance<CacheType::type, head, tiles>(const Call&, const Work&, const Maps&, \
                                                                     cudaStream_t);
#include "cuda/decode/instances.inc"
#undef OCTAVO_DECODE_INSTANCE

}  // namespace octavo::cuda::decode
