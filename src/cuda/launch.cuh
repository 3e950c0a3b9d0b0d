// Kernel launches that report their own error, and no other's.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

namespace octavo::cuda {

template <typename... Parameters, typename... Values>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, unsigned threads, std::size_t shared_bytes,
                   cudaStream_t stream, Values&&... values) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Values>(values)...);
}

}  // namespace octavo::cuda
