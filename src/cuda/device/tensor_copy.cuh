// Copies of boxes of a tensor into shared memory by the copy engine of compute capability 9.0. Elsewhere there are
// none: kHasTensorCopies is false, and these do nothing.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace octavo::cuda {

#if __CUDA_ARCH__ >= 900
inline constexpr bool kHasTensorCopies = true;
#else
inline constexpr bool kHasTensorCopies = false;
#endif

// Barriers that this thread has initialised are known to the copy engine.
__device__ inline void publish_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Arrives at a barrier, whose phase then also waits for so many bytes.
__device__ inline void arrive_and_expect([[maybe_unused]] std::uint32_t barrier, [[maybe_unused]] int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}

// Where a box begins in a tensor of four axes.
struct BoxPlace {
  std::int32_t x, y, z, w;
};

// Starts to copy a box; what is outside the tensor becomes zeros, unread.
__device__ inline void copy_box([[maybe_unused]] std::uint32_t to, [[maybe_unused]] const CUtensorMap* map,
                                [[maybe_unused]] const BoxPlace& from, [[maybe_unused]] std::uint32_t barrier,
                                [[maybe_unused]] std::uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, "
      "%4, %5}], [%6], %7;" ::"r"(to),
      "l"(map), "r"(from.x), "r"(from.y), "r"(from.z), "r"(from.w), "r"(barrier), "l"(policy)
      : "memory");
#endif
}

__device__ inline void prefetch_map([[maybe_unused]] const CUtensorMap* map) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

}  // namespace octavo::cuda
