// The backends of this build, in order of preference: plan() takes the first that accepts a Problem.
// To add one: a folder with its Backend object, and its line here.
#include "cpu/backend.h"
#if OCTAVO_CUDA
#include "cuda/backend.h"
#endif
#include "dispatch/backend.h"

namespace octavo::dispatch {

std::span<const Backend* const> backends() noexcept {
  static constexpr const Backend* kBackends[] = {
#if defined(__x86_64__)
    &cpu::kAvx512VnniBackend,
    &cpu::kAvx512Backend,
    &cpu::kAvx2Backend,
#endif
    &cpu::kBaselineBackend,
#if OCTAVO_CUDA
    &cuda::kDecodeBackend,
    &cuda::kGeneralBackend,
#endif
  };
  return kBackends;
}

}  // namespace octavo::dispatch
