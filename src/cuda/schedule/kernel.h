// First kernel of a call: reads the lengths and leaves a record per sequence (call.h) that every other kernel may
// trust.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/call.h"

namespace octavo::cuda {

cudaError_t launch_schedule(const Call& call, cudaStream_t stream);

}  // namespace octavo::cuda
