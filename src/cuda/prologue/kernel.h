// Second kernel of a call: the new tokens' K and V go to the caches, and the outputs of tokens that no sequence owns to
// 0.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/call.h"

namespace octavo::cuda {

cudaError_t launch_prologue(const Call& call, cudaStream_t stream);

}  // namespace octavo::cuda
