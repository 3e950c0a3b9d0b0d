#include "cuda/start.h"

#include "cuda/prologue/kernel.h"
#include "cuda/runtime.h"
#include "cuda/schedule/kernel.h"

namespace octavo::cuda {

Status launch_start(const Call& call, cudaStream_t stream) noexcept {
  if (call.scratch.records != nullptr) {
    if (const cudaError_t error = launch_schedule(call, stream); error != cudaSuccess) {
      return to_status(error, "the launch of the schedule kernel");
    }
  }
  return to_status(launch_prologue(call, stream), "the launch of the prologue kernel");
}

}  // namespace octavo::cuda
