// Kernel launches that report their own error, and no other's.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

namespace octavo::cuda {

// The same for a kernel that calls wait_for_earlier_kernels() (device/overlap.cuh): where `overlaps`, it may start
// before the kernel ahead of it on the stream has ended.
template <typename... Parameters, typename... Values>
cudaError_t launch_early(bool overlaps, void (*kernel)(Parameters...), dim3 grid, unsigned threads,
                         std::size_t shared_bytes, cudaStream_t stream, Values&&... values) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = overlaps ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Values>(values)...);
}

template <typename... Parameters, typename... Values>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, unsigned threads, std::size_t shared_bytes,
                   cudaStream_t stream, Values&&... values) {
  return launch_early(false, kernel, grid, threads, shared_bytes, stream, std::forward<Values>(values)...);
}

}  // namespace octavo::cuda
