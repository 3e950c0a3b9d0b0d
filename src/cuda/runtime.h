// What the host asks the CUDA runtime: facts about a device, and the words for an error.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "octavo/status.h"

namespace octavo::cuda {

struct DeviceFacts {
  int compute_capability = 0;                                // 90 for 9.0
  int shared_memory = 0;                                     // bytes that one block can have
  int shared_memory_per_sm = 0, shared_memory_reserved = 0;  // bytes for all blocks of an SM; of each, the system's own
  int multiprocessors = 0;
};

// Facts of the device of this ordinal, asked once per ordinal and then kept. The sentence says why there are none: no
// driver, no such device.
std::string read_device(int ordinal, DeviceFacts& facts);

// The same; a device older than the kernels' code is refused too.
std::string read_usable_device(int ordinal, DeviceFacts& facts);

// The facts of the calling thread's current device.
Status read_current_device(DeviceFacts& facts);

// kInternal: "CUDA: <what> failed: <the runtime's words>"; Ok for cudaSuccess.
Status to_status(cudaError_t error, const char* what) noexcept;

}  // namespace octavo::cuda
