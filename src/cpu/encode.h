// One float to one code, in plain arithmetic: the write path is a few rows a token, so these are kept simple and exact.
// Rounding is to nearest, ties to even, and saturates (docs/contract.md). Integer and e2m1 codes have no NaN: it
// becomes 0.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace octavo::cpu {

// Valid for |x| < 2^22: adding and subtracting 1.5 * 2^23 leaves the nearest integer, ties to even, in any target's
// code.
inline float round_half_even(float x) noexcept {
  constexpr float kMagic = 12582912.0f;
  return (x + kMagic) - kMagic;
}

// For rows' tails, and for targets without the instruction.
inline std::uint16_t encode_float16(float x) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  std::uint32_t code = 0;
  if (magnitude > 0x7F800000u) {
    code = 0x7E00u;  // NaN
  } else if (magnitude >= 0x47800000u) {
    code = 0x7C00u;                      // 2^16 and beyond, infinity included
  } else if (magnitude < 0x38800000u) {  // below 2^-14: multiples of 2^-24
    code = static_cast<std::uint32_t>(round_half_even(std::fabs(x) * 16777216.0f));
  } else {
    // From 65520 on, the carry makes this infinity's code.
    code = ((magnitude + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13) - (112u << 10);
  }
  return static_cast<std::uint16_t>(sign | code);
}

inline std::uint16_t encode_bfloat16(float x) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (x != x) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline std::int8_t encode_int8(float x) noexcept {
  const float clamped = std::min(std::max(x == x ? x : 0.0f, -128.0f), 127.0f);
  return static_cast<std::int8_t>(round_half_even(clamped));
}

// q + 8, q in [-8, 7].
inline std::uint8_t encode_int4(float x) noexcept {
  const float clamped = std::min(std::max(x == x ? x : 0.0f, -8.0f), 7.0f);
  return static_cast<std::uint8_t>(static_cast<int>(round_half_even(clamped)) + 8);
}

// e4m3fn: bias 7, no infinity, largest 448 (0x7E), NaN 0x7F.
inline std::uint8_t encode_float8(float x) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  const float magnitude = std::fabs(x);
  std::uint32_t code = 0;
  if (x != x) {
    code = 0x7Fu;
  } else if (magnitude >= 448.0f) {
    code = 0x7Eu;
  } else if (magnitude < 0.015625f) {  // below 2^-6: multiples of 2^-9; 8 of them are the smallest normal number
    code = static_cast<std::uint32_t>(round_half_even(magnitude * 512.0f));
  } else {
    const std::uint32_t m = bits & 0x7FFFFFFFu;
    const std::uint32_t rounded = m + 0x7FFFFu + ((m >> 20) & 1u);
    code = (rounded >> 20) - (120u << 3);  // float's exponent bias 127 becomes 7
  }
  return static_cast<std::uint8_t>(sign | code);
}

// e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
inline std::uint8_t encode_float4(float x) noexcept {
  const float magnitude = x == x ? std::min(std::fabs(x), 6.0f) : 0.0f;
  const auto sign = static_cast<std::uint8_t>(x < 0.0f ? 8 : 0);
  int code = 0;
  if (magnitude < 2.0f) {
    code = static_cast<int>(round_half_even(magnitude * 2.0f));
  } else if (magnitude < 4.0f) {
    code = static_cast<int>(round_half_even(magnitude)) + 2;
  } else {
    code = static_cast<int>(round_half_even(magnitude * 0.5f)) + 4;
  }
  return static_cast<std::uint8_t>(sign | code);
}

}  // namespace octavo::cpu
