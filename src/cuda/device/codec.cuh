// Cache elements to numbers, eight channels at a time; encode.cuh is the way back. Codes are decoded without their
// scale, exactly: every code of every format is a number of float16 and of bfloat16. The kernels fold scales into Q
// (for K) and into the epilogue.
#pragma once

#include <cuda_fp8.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/call.h"
#include "cuda/device/element.cuh"

namespace octavo::cuda {

__device__ inline bool is_float(CacheType type) {
  return type <= CacheType::kBFloat16;
}

// Whether a cache of this type holds T as it is.
template <typename T>
OCTAVO_HOST_DEVICE inline bool holds(CacheType type) {
  return type == (std::is_same_v<T, float>    ? CacheType::kFloat32
                  : std::is_same_v<T, __half> ? CacheType::kFloat16
                                              : CacheType::kBFloat16);
}

// Bytes of eight stored elements.
OCTAVO_HOST_DEVICE constexpr int unit_bytes(CacheType type) {
  switch (type) {
    case CacheType::kFloat16:
    case CacheType::kBFloat16: return 16;
    case CacheType::kInt8:
    case CacheType::kFloat8E4M3FN: return 8;
    case CacheType::kInt4:
    case CacheType::kFloat4E2M1: return 4;
    default: return 32;
  }
}

// Eight stored elements of at most two bytes each.
__device__ inline uint4 load_codes(CacheType type, const std::byte* from, bool aligned) {
  uint4 codes{};
  const int bytes = unit_bytes(type);
  if (aligned) {
    if (bytes == 16) {
      codes = *reinterpret_cast<const uint4*>(from);
    } else if (bytes == 8) {
      const uint2 half = *reinterpret_cast<const uint2*>(from);
      codes.x = half.x;
      codes.y = half.y;
    } else {
      codes.x = *reinterpret_cast<const std::uint32_t*>(from);
    }
    return codes;
  }
  std::uint32_t words[4] = {};
  if (bytes == 16) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      words[i / 2] |= static_cast<std::uint32_t>(reinterpret_cast<const std::uint16_t*>(from)[i]) << (16 * (i % 2));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < bytes) words[i / 4] |= static_cast<std::uint32_t>(from[i]) << (8 * (i % 4));
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Byte `i` of a word of biased bytes as the float 2^23 + byte; the caller takes the 2^23 and the bias off.
__device__ inline float biased_byte(std::uint32_t word, int i) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7650u | static_cast<unsigned>(i)));
}

__device__ inline void decode_int8(std::uint32_t word, float* x) {
  const std::uint32_t biased = word ^ 0x80808080u;  // code + 128
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = biased_byte(biased, i) - (8388608.0f + 128.0f);
}

__device__ inline void decode_float8(std::uint32_t word, float* x) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto pair = static_cast<__nv_fp8x2_storage_t>(word >> (16 * i));
    const __half2 halves = __half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3));
    x[2 * i] = __low2float(halves);
    x[2 * i + 1] = __high2float(halves);
  }
}

// Nibbles of a word to the low nibbles of eight bytes, in order.
__device__ inline uint2 spread_nibbles(std::uint32_t word) {
  const std::uint32_t low = word & 0x0f0f0f0fu;
  const std::uint32_t high = (word >> 4) & 0x0f0f0f0fu;
  return make_uint2(__byte_perm(low, high, 0x5140), __byte_perm(low, high, 0x7362));
}

__device__ inline void decode_int4(std::uint32_t nibbles, float* x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = biased_byte(nibbles, i) - (8388608.0f + 8.0f);
}

// An e2m1 code in the exponent and top mantissa bits of a float16 is the value times 2^-14, subnormals included.
__device__ inline void decode_float4(std::uint32_t nibbles, float* x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t code = nibbles >> (8 * i) & 15u;
    const auto bits = static_cast<unsigned short>((code & 7u) << 9 | (code & 8u) << 12);
    x[i] = __half2float(__ushort_as_half(bits)) * 16384.0f;
  }
}

// Eight codes of at most two bytes each to floats.
__device__ inline void decode_unit(CacheType type, const uint4& codes, float (&x)[kUnit]) {
  const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  switch (type) {
    case CacheType::kFloat16:
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const __half2 pair = reinterpret_cast<const __half2&>(words[i]);
        x[2 * i] = __low2float(pair);
        x[2 * i + 1] = __high2float(pair);
      }
      return;
    case CacheType::kBFloat16:
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[2 * i] = __uint_as_float(words[i] << 16);
        x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      }
      return;
    case CacheType::kInt8:
      decode_int8(words[0], x);
      decode_int8(words[1], x + 4);
      return;
    case CacheType::kFloat8E4M3FN:
      decode_float8(words[0], x);
      decode_float8(words[1], x + 4);
      return;
    case CacheType::kInt4: {
      const uint2 nibbles = spread_nibbles(words[0]);
      decode_int4(nibbles.x, x);
      decode_int4(nibbles.y, x + 4);
      return;
    }
    default: {
      const uint2 nibbles = spread_nibbles(words[0]);
      decode_float4(nibbles.x, x);
      decode_float4(nibbles.y, x + 4);
      return;
    }
  }
}

// Four bytes as float16: 1024 + byte is the byte in the mantissa of 1024, and `bias` takes the 1024 and the code's bias
// off.
__device__ inline uint2 bytes_to_half(std::uint32_t word, __half bias) {
  const std::uint32_t words[2] = {__byte_perm(word, 0x64646464u, 0x4140), __byte_perm(word, 0x64646464u, 0x4342)};
  const __half2 biases = __half2half2(bias);
  const __half2 low = __hsub2(reinterpret_cast<const __half2&>(words[0]), biases);
  const __half2 high = __hsub2(reinterpret_cast<const __half2&>(words[1]), biases);
  return make_uint2(reinterpret_cast<const std::uint32_t&>(low), reinterpret_cast<const std::uint32_t&>(high));
}

__device__ inline uint2 float8_to_half(std::uint32_t word) {
  const __half2 low = __half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(word), __NV_E4M3));
  const __half2 high = __half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(word >> 16), __NV_E4M3));
  return make_uint2(reinterpret_cast<const std::uint32_t&>(low), reinterpret_cast<const std::uint32_t&>(high));
}

// Eight e2m1 codes as float16, whose low bytes are zero: the high byte of a magnitude is one of eight.
__device__ inline uint4 float4_to_half(std::uint32_t word) {
  constexpr std::uint32_t kBelow2 = 0x3e3c3800u;  // 0, 0.5, 1 and 1.5
  constexpr std::uint32_t kFrom2 = 0x46444240u;   // 2, 3, 4 and 6
  const std::uint32_t magnitudes = word & 0x77777777u;
  const uint2 nibbles = spread_nibbles(word);
  const std::uint32_t low = __byte_perm(kBelow2, kFrom2, magnitudes) | (nibbles.x << 4 & 0x80808080u);
  const std::uint32_t high = __byte_perm(kBelow2, kFrom2, magnitudes >> 16) | (nibbles.y << 4 & 0x80808080u);
  return make_uint4(__byte_perm(low, 0u, 0x1404), __byte_perm(low, 0u, 0x3424), __byte_perm(high, 0u, 0x1404),
                    __byte_perm(high, 0u, 0x3424));
}

// Four e2m1 codes, in the bytes of a word, as bfloat16: a code's bits, put where exponent and fraction meet, are the
// value times 2^-126, subnormals included.
__device__ inline uint2 float4_to_bfloat16(std::uint32_t nibbles) {
  std::uint32_t words[2] = {__byte_perm(nibbles, 0u, 0x4140), __byte_perm(nibbles, 0u, 0x4342)};
#pragma unroll
  for (std::uint32_t& word : words) {
    word = (word & 0x00070007u) << 6 | (word & 0x00080008u) << 12;
    const __nv_bfloat162 value =
        __hmul2(reinterpret_cast<const __nv_bfloat162&>(word), __bfloat162bfloat162(__ushort_as_bfloat16(0x7e80)));
    word = reinterpret_cast<const std::uint32_t&>(value);
  }
  return make_uint2(words[0], words[1]);
}

// Eight codes of at most two bytes each to T at a 16-byte boundary. float16 has ways of its own, half as long as those
// through float32.
template <typename T>
__device__ inline void decode_to(CacheType type, const uint4& codes, T* to) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if (type == CacheType::kFloat4E2M1) {
      const uint2 nibbles = spread_nibbles(codes.x);
      const uint2 low = float4_to_bfloat16(nibbles.x);
      const uint2 high = float4_to_bfloat16(nibbles.y);
      *reinterpret_cast<uint4*>(to) = make_uint4(low.x, low.y, high.x, high.y);
      return;
    }
  }
  if constexpr (std::is_same_v<T, __half>) {
    uint2 low{};
    uint2 high{};
    bool done = true;
    switch (type) {
      case CacheType::kInt8:
        low = bytes_to_half(codes.x ^ 0x80808080u, __float2half_rn(1024.0f + 128.0f));
        high = bytes_to_half(codes.y ^ 0x80808080u, __float2half_rn(1024.0f + 128.0f));
        break;
      case CacheType::kFloat8E4M3FN:
        low = float8_to_half(codes.x);
        high = float8_to_half(codes.y);
        break;
      case CacheType::kInt4: {
        const uint2 nibbles = spread_nibbles(codes.x);
        low = bytes_to_half(nibbles.x, __float2half_rn(1024.0f + 8.0f));
        high = bytes_to_half(nibbles.y, __float2half_rn(1024.0f + 8.0f));
        break;
      }
      case CacheType::kFloat4E2M1: *reinterpret_cast<uint4*>(to) = float4_to_half(codes.x); return;
      default: done = false; break;
    }
    if (done) {
      *reinterpret_cast<uint4*>(to) = make_uint4(low.x, low.y, high.x, high.y);
      return;
    }
  }
  float x[kUnit];
  decode_unit(type, codes, x);
  store_unit(to, x);
}

}  // namespace octavo::cuda
