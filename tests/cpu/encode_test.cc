// Risk: a code one step off at a tie, at the saturation edge, or among subnormals, which no attention tolerance would
// show. Right values come from first principles: of all codes, the nearest; of two equally near, the even one.
#include "cpu/encode.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace octavo::cpu {
namespace {

double float8_value(int code) {
  const int exponent = (code >> 3) & 15;
  const int mantissa = code & 7;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

double float4_value(int code) {
  constexpr double kMagnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return (code & 8) != 0 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7];
}

// Index of the nearest of `values` (ascending, all finite); ties go to the even index.
int nearest(const std::vector<double>& values, double x) {
  int best = 0;
  for (int i = 1; i < static_cast<int>(values.size()); ++i) {
    const double gain =
        std::fabs(values[static_cast<std::size_t>(best)] - x) - std::fabs(values[static_cast<std::size_t>(i)] - x);
    if (gain > 0 || (gain == 0 && i % 2 == 0)) best = i;
  }
  return best;
}

// Every representable magnitude, every midpoint, and a float to either side of each.
std::vector<float> interesting(const std::vector<double>& magnitudes) {
  std::vector<float> inputs;
  const auto add = [&](double centre) {
    const auto x = static_cast<float>(centre);
    const float infinity = std::numeric_limits<float>::infinity();
    for (const float y : {x, std::nextafter(x, infinity), std::nextafter(x, -infinity)}) {
      if (y >= 0) inputs.push_back(y);
    }
  };
  for (std::size_t i = 0; i < magnitudes.size(); ++i) {
    add(magnitudes[i]);
    if (i > 0) add((magnitudes[i - 1] + magnitudes[i]) / 2);
  }
  for (const double beyond : {magnitudes.back() * 1.01, magnitudes.back() * 1.1, magnitudes.back() * 100, 1e38})
    add(beyond);
  inputs.push_back(std::numeric_limits<float>::infinity());
  inputs.push_back(std::numeric_limits<float>::denorm_min());
  return inputs;
}

// Beyond every code; larger numbers would drown the distances between codes.
double clamped(float x) {
  return std::fmin(static_cast<double>(x), 1e6);
}

TEST(Encode, Float8IsNearestTiesToEvenAndSaturates) {
  std::vector<double> magnitudes;
  for (int code = 0; code < 0x7F; ++code) magnitudes.push_back(float8_value(code));
  for (const float x : interesting(magnitudes)) {
    const int expected = nearest(magnitudes, clamped(x));
    EXPECT_EQ(encode_float8(x), expected) << x;
    EXPECT_EQ(encode_float8(-x), expected | 0x80) << -x;
  }
  EXPECT_EQ(encode_float8(std::numeric_limits<float>::quiet_NaN()) & 0x7F, 0x7F);
}

TEST(Encode, Float4IsNearestTiesToEvenAndSaturates) {
  std::vector<double> magnitudes;
  for (int code = 0; code < 8; ++code) magnitudes.push_back(float4_value(code));
  for (const float x : interesting(magnitudes)) {
    const int expected = nearest(magnitudes, clamped(x));
    EXPECT_EQ(encode_float4(x), expected) << x;
    EXPECT_EQ(float4_value(encode_float4(-x)), -float4_value(expected)) << -x;
  }
  EXPECT_EQ(encode_float4(std::numeric_limits<float>::quiet_NaN()), 0);
}

TEST(Encode, Float16IsNearestTiesToEven) {
  // Code + 1 is the next value; past the largest, the midpoint to 65536 rounds to infinity.
  const auto value = [](int code) {
    const int exponent = code >> 10;
    return exponent == 0 ? std::ldexp(code & 1023, -24) : std::ldexp(1024 + (code & 1023), exponent - 25);
  };
  for (int code = 0; code < 0x7C00; ++code) {
    const auto exact = static_cast<float>(value(code));
    const auto midpoint = static_cast<float>((value(code) + value(code + 1)) / 2);
    ASSERT_EQ(encode_float16(exact), code) << exact;
    ASSERT_EQ(encode_float16(-exact), code | 0x8000) << -exact;
    ASSERT_EQ(encode_float16(midpoint), code + (code & 1)) << midpoint;
    ASSERT_EQ(encode_float16(std::nextafter(midpoint, 0.0f)), code) << midpoint;
    ASSERT_EQ(encode_float16(std::nextafter(midpoint, 1e30f)), code + 1) << midpoint;
  }
  EXPECT_EQ(encode_float16(std::numeric_limits<float>::infinity()), 0x7C00);
  EXPECT_EQ(encode_float16(1e30f), 0x7C00);
  EXPECT_EQ(encode_float16(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_GT(encode_float16(std::numeric_limits<float>::quiet_NaN()) & 0x7FFF, 0x7C00);
}

TEST(Encode, IntegersRoundHalfToEvenAndSaturate) {
  for (int half_steps = -300; half_steps <= 300; ++half_steps) {
    const float x = static_cast<float>(half_steps) * 0.5f;
    const double rounded = std::nearbyint(static_cast<double>(x));  // the default mode: ties to even
    EXPECT_EQ(encode_int8(x), static_cast<int>(std::fmin(std::fmax(rounded, -128.0), 127.0))) << x;
    EXPECT_EQ(encode_int4(x), static_cast<int>(std::fmin(std::fmax(rounded, -8.0), 7.0)) + 8) << x;
  }
  EXPECT_EQ(encode_int8(std::numeric_limits<float>::infinity()), 127);
  EXPECT_EQ(encode_int8(-std::numeric_limits<float>::infinity()), -128);
  EXPECT_EQ(encode_int8(std::numeric_limits<float>::quiet_NaN()), 0);
  EXPECT_EQ(encode_int4(std::numeric_limits<float>::quiet_NaN()), 8);
}

TEST(Encode, BFloat16RoundsHalfToEven) {
  EXPECT_EQ(encode_bfloat16(1.0f), 0x3F80);
  EXPECT_EQ(encode_bfloat16(std::bit_cast<float>(0x3F808000u)), 0x3F80);  // tie, even below
  EXPECT_EQ(encode_bfloat16(std::bit_cast<float>(0x3F818000u)), 0x3F82);  // tie, even above
  EXPECT_EQ(encode_bfloat16(std::bit_cast<float>(0x3F808001u)), 0x3F81);
  EXPECT_EQ(encode_bfloat16(std::numeric_limits<float>::max()), 0x7F80);  // rounds to infinity
  const std::uint16_t nan = encode_bfloat16(std::bit_cast<float>(0x7F800001u));
  EXPECT_EQ(nan & 0x7F80, 0x7F80);
  EXPECT_NE(nan & 0x7F, 0);
}

}  // namespace
}  // namespace octavo::cpu
