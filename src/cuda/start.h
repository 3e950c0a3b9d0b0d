// How every call starts.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/call.h"
#include "octavo/status.h"

namespace octavo::cuda {

// The schedule kernel, where the call has records for it, and the prologue.
Status launch_start(const Call& call, cudaStream_t stream) noexcept;

}  // namespace octavo::cuda
