// Numbers to cache elements, eight channels at a time: code = round_half_even(x / scale), saturated.
#pragma once

#include <cuda_fp8.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/call.h"
#include "cuda/device/codec.cuh"
#include "cuda/device/element.cuh"

namespace octavo::cuda {

// Divides by a scale with two multiplications: 1 / scale is kept as a sum of two floats, to about 2^-42, so that the
// quotient is rounded once and a tie stays a tie. Both parts have the scale's sign and are not 0, so that an infinity
// stays one. Scales near the ends of float32's range are divided by.
struct Divisor {
  float scale, high, low;

  __device__ explicit Divisor(float scale_) : scale(scale_) {
    float approximate;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(approximate) : "f"(scale));
    high = approximate * (1.0f - 0x1p-21f);
    low = fmaf(-high, scale, 1.0f) * approximate;
  }
  __device__ bool splits() const { return fabsf(scale) > 1e-30f && fabsf(scale) < 1e30f; }
  __device__ float divide(float x) const { return fmaf(x, high, x * low); }
};

// Two numbers, rounded to integers and saturated, above or below `others` in a word of bytes or nibbles. NaN becomes 0.
__device__ inline std::uint32_t pack_int8(float low, float high, std::uint32_t others) {
  std::uint32_t word;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;"
      : "=r"(word)
      : "r"(__float2int_rn(high)), "r"(__float2int_rn(low)), "r"(others));
  return word;  // others << 16 | high << 8 | low
}
__device__ inline std::uint32_t pack_int4(float low, float high, std::uint32_t others) {
  std::uint32_t word;
  asm("cvt.pack.sat.s4.s32.b32 %0, %1, %2, %3;"
      : "=r"(word)
      : "r"(__float2int_rn(high)), "r"(__float2int_rn(low)), "r"(others));
  return word;  // others << 8 | high << 4 | low
}

// e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; NaN becomes 0.
__device__ inline std::uint32_t encode_float4(float x) {
  const float magnitude = x == x ? fminf(fabsf(x), 6.0f) : 0.0f;
  int code = 0;
  if (magnitude < 2.0f) {
    code = __float2int_rn(magnitude * 2.0f);
  } else if (magnitude < 4.0f) {
    code = __float2int_rn(magnitude) + 2;
  } else {
    code = __float2int_rn(magnitude * 0.5f) + 4;
  }
  return static_cast<std::uint32_t>(code) | (x < 0.0f ? 8u : 0u);
}

// Eight numbers, already divided by their scales, to eight codes of a byte or a nibble each.
template <CacheType kType>
__device__ inline uint2 encode_codes(const float (&x)[kUnit]) {
  if constexpr (kType == CacheType::kInt8) {
    return make_uint2(pack_int8(x[0], x[1], pack_int8(x[2], x[3], 0)), pack_int8(x[4], x[5], pack_int8(x[6], x[7], 0)));
  } else if constexpr (kType == CacheType::kFloat8E4M3FN) {
    std::uint32_t words[2] = {};
#pragma unroll
    for (int i = 0; i < kUnit; i += 2) {
      const __nv_fp8x2_storage_t pair =
          __nv_cvt_float2_to_fp8x2(make_float2(x[i], x[i + 1]), __NV_SATFINITE, __NV_E4M3);
      words[i / 4] |= static_cast<std::uint32_t>(pair) << (8 * (i % 4));
    }
    return make_uint2(words[0], words[1]);
  } else if constexpr (kType == CacheType::kInt4) {
    const std::uint32_t upper = pack_int4(x[4], x[5], pack_int4(x[6], x[7], 0));
    const std::uint32_t codes = pack_int4(x[0], x[1], pack_int4(x[2], x[3], upper));
    return make_uint2(codes ^ 0x88888888u, 0);  // + 8
  } else {
    static_assert(kType == CacheType::kFloat4E2M1);
    std::uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) codes |= encode_float4(x[i]) << (4 * i);
    return make_uint2(codes, 0);
  }
}

// Eight elements, already divided by their scales, to their place in a cache row. `aligned`: Cache::aligned.
template <CacheType kType>
__device__ inline void store_unit_as(const float (&x)[kUnit], bool aligned, std::byte* to) {
  if constexpr (kType == CacheType::kFloat32 || kType == CacheType::kFloat16 || kType == CacheType::kBFloat16) {
    using Element = std::conditional_t<kType == CacheType::kFloat32, float,
                                       std::conditional_t<kType == CacheType::kFloat16, __half, __nv_bfloat16>>;
    auto* elements = reinterpret_cast<Element*>(to);
    if (aligned) {
      store_unit(elements, x);
      return;
    }
#pragma unroll
    for (int i = 0; i < kUnit; ++i) elements[i] = from_float<Element>(x[i]);
  } else {
    constexpr int kBytes = kType == CacheType::kInt8 || kType == CacheType::kFloat8E4M3FN ? 8 : 4;
    const uint2 codes = encode_codes<kType>(x);
    if (!aligned) {
      const std::uint32_t words[2] = {codes.x, codes.y};
#pragma unroll
      for (int i = 0; i < kBytes; ++i) to[i] = static_cast<std::byte>(words[i / 4] >> (8 * (i % 4)));
    } else if constexpr (kBytes == 8) {
      *reinterpret_cast<uint2*>(to) = codes;
    } else {
      *reinterpret_cast<std::uint32_t*>(to) = codes.x;
    }
  }
}

// x[c] /= scales[c], of eight channels. `aligned`: the scales start at a 16-byte boundary.
__device__ inline void divide_by_channel(const float* scales, bool aligned, float (&x)[kUnit]) {
  float divisors[kUnit];
  load_unit(scales, aligned, divisors);
  float quotients[kUnit];
  bool split = true;
#pragma unroll
  for (int c = 0; c < kUnit; ++c) {
    const Divisor divisor(divisors[c]);
    split = split && divisor.splits();
    quotients[c] = divisor.divide(x[c]);
  }
#pragma unroll
  for (int c = 0; c < kUnit; ++c) {
    if (!split) quotients[c] = x[c] / divisors[c];
    x[c] = quotients[c];
  }
}

// The same with one scale.
__device__ inline void divide_by(const Divisor& divisor, float (&x)[kUnit]) {
  if (divisor.splits()) {
#pragma unroll
    for (int c = 0; c < kUnit; ++c) x[c] = divisor.divide(x[c]);
  } else {
#pragma unroll
    for (int c = 0; c < kUnit; ++c) x[c] = x[c] / divisor.scale;
  }
}

}  // namespace octavo::cuda
