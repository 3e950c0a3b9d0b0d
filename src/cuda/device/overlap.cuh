// Kernels of one call overlap: the next one starts while the one before it ends (programmatic dependent launch, from
// compute capability 9.0 on; elsewhere, and where a launch does not ask for it, both calls do nothing).
//
// The rule that makes early reads safe: every kernel calls let_next_kernel_start() only after
// wait_for_earlier_kernels(), unless the next kernel reads nothing before its own wait. A kernel that has been started
// thus finds the work of all kernels but the one right before it complete.
#pragma once

namespace octavo::cuda {

// Returns when the kernels before this one are complete and their writes are visible.
__device__ inline void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace octavo::cuda
