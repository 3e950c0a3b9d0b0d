// One floating-point mode for every lane. Hosts set flush-to-zero or another rounding on some threads and not on others
// (ONNX Runtime's set_denormal_as_zero), and a sequence's bits must not depend on the thread that it runs on.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace octavo::cpu {

// Round to nearest even, subnormals kept, exceptions masked; the thread's own mode comes back at the end of the scope.
class DefaultFloatMode {
 public:
#if defined(__x86_64__)
  DefaultFloatMode() noexcept : saved_(_mm_getcsr()) {
    _mm_setcsr(0x1F80);
  }
  ~DefaultFloatMode() {
    _mm_setcsr(static_cast<unsigned>(saved_));
  }
#elif defined(__aarch64__)
  DefaultFloatMode() noexcept {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}));
  }
  ~DefaultFloatMode() {
    asm volatile("msr fpcr, %0" : : "r"(saved_));
  }
#else
  DefaultFloatMode() noexcept = default;
#endif
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  [[maybe_unused]] std::uint64_t saved_ = 0;
};

}  // namespace octavo::cpu
