// The element types T of activations: conversions, and eight channels at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace octavo::cuda {

// Channels that one thread loads, converts and stores together; head sizes are multiples of it.
inline constexpr int kUnit = 8;

__device__ inline float to_float(float x) {
  return x;
}
__device__ inline float to_float(__half x) {
  return __half2float(x);
}
__device__ inline float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

template <typename T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Two floats as one 32-bit register of T, the first in the low half.
template <typename T>
__device__ inline std::uint32_t pack(float low, float high) {
  static_assert(sizeof(T) == 2);
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }
}

// Eight floats to eight elements at a 16-byte boundary.
template <typename T>
__device__ inline void store_unit(T* to, const float (&x)[kUnit]) {
  auto* words = reinterpret_cast<uint4*>(to);
  if constexpr (sizeof(T) == 4) {
    words[0] = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
    words[1] = make_uint4(__float_as_uint(x[4]), __float_as_uint(x[5]), __float_as_uint(x[6]), __float_as_uint(x[7]));
  } else {
    words[0] = make_uint4(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
  }
}

// Eight elements to floats. `aligned`: they start at a 16-byte boundary.
template <typename T>
__device__ inline void load_unit(const T* from, bool aligned, float (&x)[kUnit]) {
  T elements[kUnit];
  if (aligned) {
    constexpr int kWords = kUnit * sizeof(T) / sizeof(uint4);
    uint4 words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const uint4*>(from)[i];
    memcpy(elements, words, sizeof(elements));
  } else {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) elements[i] = from[i];
  }
#pragma unroll
  for (int i = 0; i < kUnit; ++i) x[i] = to_float(elements[i]);
}

// Eight elements as they are in memory, which need not be there yet.
template <typename T>
struct UnitOf {
  static constexpr int kWords = kUnit * sizeof(T) / sizeof(uint4);
  uint4 words[kWords];

  __device__ void load(const T* from, bool aligned) {
    if (aligned) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const uint4*>(from)[i];
      return;
    }
    T elements[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) elements[i] = from[i];
    memcpy(words, elements, sizeof(words));
  }

  // Four elements as the lower (0) or upper (1) half. `aligned`: to the four of them.
  __device__ void load_half(int half, const T* from, bool aligned) {
    using Word = std::conditional_t<sizeof(T) == 2, uint2, uint4>;
    Word word;
    if (aligned) {
      word = *reinterpret_cast<const Word*>(from);
    } else {
      T elements[kUnit / 2];
#pragma unroll
      for (int i = 0; i < kUnit / 2; ++i) elements[i] = from[i];
      memcpy(&word, elements, sizeof(word));
    }
    memcpy(reinterpret_cast<std::byte*>(words) + half * sizeof(word), &word, sizeof(word));
  }

  // To a 16-byte boundary.
  __device__ void store(std::byte* to) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<uint4*>(to)[i] = words[i];
  }

  __device__ void decode(float (&x)[kUnit]) const {
    std::uint32_t parts[kUnit * sizeof(T) / sizeof(std::uint32_t)];
    memcpy(parts, words, sizeof(parts));
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {  // an instruction each; the conversions cost the odd ones two
        x[i] = __uint_as_float(i % 2 == 0 ? parts[i / 2] << 16 : parts[i / 2] & 0xffff0000u);
      } else if constexpr (std::is_same_v<T, __half>) {
        const __half2 pair = reinterpret_cast<const __half2&>(parts[i / 2]);
        x[i] = i % 2 == 0 ? __low2float(pair) : __high2float(pair);
      } else {
        x[i] = __uint_as_float(parts[i]);
      }
    }
  }
};

}  // namespace octavo::cuda
