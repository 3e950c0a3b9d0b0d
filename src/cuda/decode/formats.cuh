// How each cache type becomes operands of tensor-core products: which registers hold which channels, and how codes are
// widened. K and V stay as they are in shared memory; codes become 16-bit numbers in registers.
//
// Products are S^T = K Q^T and O^T = V^T P^T, so that the few query rows are the narrow operand (8 columns) and K and V
// the wide one (16 rows): a group of up to 8 heads wastes no conversion.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "cuda/decode/shape.h"
#include "cuda/device/tensor_core.cuh"

namespace octavo::cuda::decode {

template <CacheType kType>
inline constexpr bool kIsWide = kType == CacheType::kFloat16 || kType == CacheType::kBFloat16;

// What the products are in. Codes of 8 and 4 bits are exact in float16; a bfloat16 Q is scaled row by row to fit it.
template <CacheType kType>
using Compute = std::conditional_t<kType == CacheType::kBFloat16, __nv_bfloat16, __half>;

// Where channel d of a head stands in a row of Q's fragments: product step, lane within four, register, half.
struct Place {
  unsigned step, lane, reg, half;
};

template <CacheType kType, int kHead>
__device__ constexpr Place place_of(unsigned d) {
  if constexpr (kIsWide<kType>) {  // ldmatrix's own order
    const unsigned k = d % 16;
    return {d / 16, k % 8 / 2, k / 8, k % 2};
  } else if constexpr (kType == CacheType::kInt4) {
    // A lane's 16 bytes (8, in heads of 64) are 32 channels, a word of them eight: nibbles i and i + 4 pair up.
    constexpr unsigned kLane = kHead == 64 ? 16 : 32;
    const unsigned e = d % (4 * kLane);
    const unsigned pair = e % 4;
    return {d / 128 * 8 + e % kLane / 8 * 2 + pair / 2, e / kLane, pair % 2, e % 8 / 4};
  } else {
    // A lane's 16 bytes are 16 channels, a word of them four: int8 pairs bytes (0, 2) and (1, 3), fp8 (0, 1) and (2,
    // 3).
    const unsigned e = d % 64;
    const unsigned b = e % 4;
    const bool even_odd = kType == CacheType::kInt8;
    return {d / 64 * 4 + e % 16 / 4, e / 16, even_odd ? b % 2 : b / 2, even_odd ? b / 2 : b % 2};
  }
}

__device__ inline std::uint32_t subtract(std::uint32_t x, std::uint32_t y) {
  const __half2 difference = __hsub2(reinterpret_cast<const __half2&>(x), reinterpret_cast<const __half2&>(y));
  return reinterpret_cast<const std::uint32_t&>(difference);
}
__device__ inline std::uint32_t multiply_add_halves(std::uint32_t x, std::uint32_t y, std::uint32_t z) {
  const __half2 sum = __hfma2(reinterpret_cast<const __half2&>(x), reinterpret_cast<const __half2&>(y),
                              reinterpret_cast<const __half2&>(z));
  return reinterpret_cast<const std::uint32_t&>(sum);
}
__device__ inline std::uint32_t fp8_pair(std::uint32_t low_half) {
  const __half2 pair =
      __half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(low_half & 0xffffu), __NV_E4M3));
  return reinterpret_cast<const std::uint32_t&>(pair);
}

// K's integer codes are operands as they are: a code plus its bias is a whole number, and a whole number n below 1,024
// in a float16's fraction is n * 2^-24, exactly (the tensor cores take subnormal numbers at full speed). What the bias
// adds to a row's products is its sum of Q, with which the products start, negative. The higher of two 4-bit codes
// stands four bits up and is 16 times too large: Q has a sixteenth of those channels. V's codes lose their bias before
// the product: sums over thousands of keys would lose too many bits to it.
template <CacheType kType>
inline constexpr int kCodeBias = kType == CacheType::kInt8   ? 128
                                 : kType == CacheType::kInt4 ? 8
                                                             : 0;
template <CacheType kType>
inline constexpr float kCodeUnit = kCodeBias<kType> != 0 ? 1.0f / (1 << 24) : 1.0f;

// How much too large the codes of K's channel d are: odd ones are the higher of two.
template <CacheType kType>
__device__ constexpr float excess_of(int d) {
  return kType == CacheType::kInt4 && d % 2 == 1 ? 16.0f : 1.0f;
}

// (x & mask) ^ bits in one instruction.
template <std::uint32_t kMask, std::uint32_t kBits>
__device__ inline std::uint32_t and_xor(std::uint32_t x) {
  std::uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(y) : "r"(x), "n"(kMask), "n"(kBits));
  return y;
}

// Four int8 codes as two registers: bytes (0, 2) and (1, 3). The byte in the fraction of 1024, its sign bit flipped, is
// 1024 + 128 + q.
__device__ inline void widen_int8(std::uint32_t word, std::uint32_t& even, std::uint32_t& odd) {
  even = subtract(and_xor<0x00ff00ffu, 0x64806480u>(word), 0x64806480u);
  odd = subtract(and_xor<0x00ff00ffu, 0x64806480u>(word >> 8), 0x64806480u);
}

// Eight int4 codes as four registers: nibbles (0, 4), (1, 5), (2, 6) and (3, 7).
__device__ inline void widen_int4(std::uint32_t word, std::uint32_t (&x)[4]) {
  const std::uint32_t shifted = word >> 8;
  x[0] = subtract(and_xor<0x000f000fu, 0x64006400u>(word), 0x64086408u);                          // 1024 + 8 + q
  x[1] = multiply_add_halves(and_xor<0x00f000f0u, 0x64006400u>(word), 0x2c002c00u, 0xd480d480u);  // x / 16 - 72
  x[2] = subtract(and_xor<0x000f000fu, 0x64006400u>(shifted), 0x64086408u);
  x[3] = multiply_add_halves(and_xor<0x00f000f0u, 0x64006400u>(shifted), 0x2c002c00u, 0xd480d480u);
}

// Eight int4 codes of K, in the same order and with their bias; the second and the last pair are 16 times as large.
__device__ inline void widen_int4_key(std::uint32_t word, std::uint32_t (&x)[4]) {
  const std::uint32_t shifted = word >> 8;
  x[0] = word & 0x000f000fu;
  x[1] = word & 0x00f000f0u;
  x[2] = shifted & 0x000f000fu;
  x[3] = shifted & 0x00f000f0u;
}

// A word of four codes of K, integers with their bias.
template <CacheType kType>
__device__ inline void widen_key(std::uint32_t word, std::uint32_t (&pair)[2]) {
  if constexpr (kType == CacheType::kInt8) {
    pair[0] = and_xor<0x00ff00ffu, 0x00800080u>(word);
    pair[1] = and_xor<0x00ff00ffu, 0x00800080u>(word >> 8);
  } else {
    pair[0] = fp8_pair(word);
    pair[1] = fp8_pair(word >> 16);
  }
}

// A word of V after a transposing load: bytes (0, 1) of one key, (2, 3) of the next. `even` and `odd` get the numbers
// of both keys, of the even and of the odd byte.
template <CacheType kType>
__device__ inline void widen_value(std::uint32_t word, std::uint32_t& even, std::uint32_t& odd) {
  if constexpr (kType == CacheType::kInt8) {
    widen_int8(word, even, odd);
  } else {
    const std::uint32_t sorted = __byte_perm(word, 0, 0x3120);
    even = fp8_pair(sorted);
    odd = fp8_pair(sorted >> 16);
  }
}

// The channel, within 16-row tile `tile` of O^T, of row r (0 to 15).
template <CacheType kType>
__device__ constexpr int value_channel(int tile, int r) {
  if constexpr (kIsWide<kType>) return tile * 16 + r;
  if constexpr (kType == CacheType::kInt4) return tile / 2 * 32 + r % 8 * 4 + tile % 2 * 2 + r / 8;
  return tile * 16 + r % 8 * 2 + r / 8;
}

// An 8 x 8 matrix of 16-bit elements transposed across the warp.
__device__ inline std::uint32_t transpose(std::uint32_t x) {
  std::uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

}  // namespace octavo::cuda::decode
