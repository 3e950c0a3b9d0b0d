// First kernel of a call: reads the lengths and leaves a record per sequence (call.h) that every other kernel may
// trust.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/call.h"

namespace octavo::cuda {

cudaError_t launch_schedule(const Call& call, cudaStream_t stream);

// Whether the machine code that the current device runs waits for earlier kernels (device/overlap.cuh). Code for 8.x
// does not, nor does what a driver made of it for a later device.
bool schedule_waits(int compute_capability) noexcept;

}  // namespace octavo::cuda
