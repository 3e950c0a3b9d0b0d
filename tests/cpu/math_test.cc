// Risk: a vector function that is wrong at an edge (-inf must give exactly 0, NaN must stay NaN), or less accurate than
// it says. Runs in the target that this file is compiled for; the others share the source and the cases in
// tests/backends.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#define HWY_COMPILE_ONLY_STATIC
#include "hwy/highway.h"

#include "cpu/math-inl.h"

namespace octavo::cpu {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

float vector_exp(float x) {
  const HWY_CAPPED(float, 1) d;
  return hn::GetLane(HWY_NAMESPACE::exp_nonpositive(d, hn::Set(d, x)));
}

float vector_tanh(float x) {
  const HWY_CAPPED(float, 1) d;
  return hn::GetLane(HWY_NAMESPACE::tanh(d, hn::Set(d, x)));
}

TEST(VectorMath, ExpIsAccurate) {
  double worst = 0;
  for (double x = 0; x > -87.2; x -= 0.00037) {
    const auto input = static_cast<float>(x);
    const double right = std::exp(static_cast<double>(input));
    worst = std::max(worst, std::fabs(vector_exp(input) - right) / right);
  }
  EXPECT_LT(worst, 3e-7);
  EXPECT_EQ(vector_exp(0.0f), 1.0f);
}

TEST(VectorMath, ExpOfExcludedIsExactlyZeroAndNanStays) {
  EXPECT_EQ(vector_exp(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_EQ(vector_exp(-1000.0f), 0.0f);
  EXPECT_EQ(vector_exp(std::numeric_limits<float>::lowest()), 0.0f);
  EXPECT_TRUE(std::isnan(vector_exp(std::numeric_limits<float>::quiet_NaN())));
}

TEST(VectorMath, TanhIsAccurate) {
  double worst = 0;
  for (double x = 1e-6; x < 60; x *= 1.0003) {
    const auto input = static_cast<float>(x);
    const double right = std::tanh(static_cast<double>(input));
    worst = std::max(worst, std::fabs(vector_tanh(input) - right) / right);
    EXPECT_EQ(vector_tanh(-input), -vector_tanh(input));
  }
  EXPECT_LT(worst, 5e-7);
  EXPECT_EQ(vector_tanh(0.0f), 0.0f);
  EXPECT_EQ(vector_tanh(std::numeric_limits<float>::infinity()), 1.0f);
  EXPECT_TRUE(std::isnan(vector_tanh(std::numeric_limits<float>::quiet_NaN())));
}

}  // namespace
}  // namespace octavo::cpu
