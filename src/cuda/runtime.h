// What the host asks the CUDA runtime: facts about a device, and the words for an error.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "octavo/status.h"

namespace octavo::cuda {

struct DeviceFacts {
  int compute_capability = 0;  // 90 for 9.0
  int shared_memory = 0;       // bytes that one block can have
};

// Facts of the device of this ordinal, asked once per ordinal and then kept. The sentence says why there are none: no
// driver, no such device.
std::string read_device(int ordinal, DeviceFacts& facts);

// The facts of the calling thread's current device.
Status read_current_device(DeviceFacts& facts);

// kInternal: "CUDA: <what> failed: <the runtime's words>"; Ok for cudaSuccess.
Status to_status(cudaError_t error, const char* what) noexcept;

}  // namespace octavo::cuda
