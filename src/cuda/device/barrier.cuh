// Barriers in shared memory (mbarrier): a phase ends when a number of arrivals and all announced bytes have come.
#pragma once

#include <cstdint>

namespace octavo::cuda {

__device__ inline void init_barrier(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ inline void arrive(std::uint32_t barrier) {
  asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared.b64 state, [%0];\n\t}" ::"r"(barrier) : "memory");
}

// Arrives when all copies that this thread has started with cp.async are complete.
__device__ inline void arrive_after_copies(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Returns when the phase of this parity has ended.
__device__ inline void wait_for_phase(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done = 0;
  do {
#if __CUDA_ARCH__ >= 900  // this one sleeps
    asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n\tselp.b32 %0, 1, 0, p;\n\t}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#else
    asm volatile("{\n\t.reg .pred p;\n\tmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n\tselp.b32 %0, 1, 0, p;\n\t}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#endif
  } while (done == 0);
}

// A barrier of some warps of a block; `name` from 1 to 15 (0 is __syncthreads()).
template <int kThreads>
__device__ inline void sync_threads(int name) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "n"(kThreads) : "memory");
}

// The same, and whether any of the threads says so.
template <int kThreads>
__device__ inline bool any_of_threads(int name, bool here) {
  std::uint32_t any;
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %3, 0;\n\tbar.red.or.pred p, %1, %2, p;\n\tselp.b32 %0, 1, 0, p;\n\t}"
      : "=r"(any)
      : "r"(name), "n"(kThreads), "r"(static_cast<std::uint32_t>(here))
      : "memory");
  return any != 0;
}

}  // namespace octavo::cuda
