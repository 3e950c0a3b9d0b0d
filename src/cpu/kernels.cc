// The kernels, compiled once per instruction set by Highway's foreach_target: this file includes itself for each
// target. Highway is used header-only, without its dispatch: dispatch/ chooses among the tables below, and each is a
// backend.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "contract/visible.h"
#include "cpu/encode.h"
#include "cpu/kernels.h"

// On x86-64 three targets: SSE4 (this file's compile flags make it Highway's static target), AVX2, AVX-512. Those
// between and beyond add little here, and each one costs compile time and size. (Highway numbers better targets lower,
// so one less than a target's bit stands for all that are better.)
#if defined(__x86_64__)
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | (HWY_AVX3 - 1))
#else
#define HWY_DISABLED_TARGETS (HWY_NEON - 1)
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

// Each needs those above it.
// clang-format off
#include "cpu/math-inl.h"
#include "cpu/codecs-inl.h"
#include "cpu/tile-inl.h"
#include "cpu/stream-inl.h"
#include "cpu/float8-inl.h"
#include "cpu/integer-inl.h"
#include "cpu/prologue-inl.h"
#include "cpu/attention-inl.h"
// clang-format on

namespace octavo::cpu::HWY_NAMESPACE {
template <class Products>
constexpr Kernels kernels_for() {
  return {store_tokens, load_queries<Products>, attend_chunk<Products>, fold, finish<Products>};
}
constexpr Kernels kKernels = kernels_for<FloatProducts>();
#if HWY_TARGET == HWY_AVX3
constexpr Kernels kVnniKernels = kernels_for<VnniProducts>();
#endif
}  // namespace octavo::cpu::HWY_NAMESPACE

#if HWY_ONCE
namespace octavo::cpu {
#if defined(__x86_64__)
const Kernels kAvx512VnniKernels = N_AVX3::kVnniKernels;
const Kernels kAvx512Kernels = N_AVX3::kKernels;
const Kernels kAvx2Kernels = N_AVX2::kKernels;
#endif
const Kernels kBaselineKernels = HWY_STATIC_DISPATCH(kKernels);
}  // namespace octavo::cpu
#endif
