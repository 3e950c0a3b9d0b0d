// Division by multiplication, on the host. Risk: a quotient that is off by one for some number, and with it the wrong
// row, token or page.
#include "cuda/device/quotient.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace octavo::cuda {
namespace {

constexpr std::int32_t kLargest = std::numeric_limits<std::int32_t>::max();

void check_around(std::int64_t divisor, std::int64_t n) {
  const Quotient quotient(divisor);
  for (std::int64_t near = n - 2; near <= n + 2; ++near) {
    if (near < 0 || near > kLargest) continue;
    EXPECT_EQ(quotient.of(static_cast<std::int32_t>(near)), near / divisor) << near << " / " << divisor;
  }
}

TEST(Quotient, IsExactAroundMultiplesAndPowersOfTwo) {
  std::vector<std::int64_t> divisors = {
      1, 2, 3, 5, 7, 12, 96, 641, 65535, 65536, 65537, kLargest, std::int64_t{1} << 31};
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 generator(seed);
  for (int bits = 1; bits <= 31; ++bits) {
    const std::int64_t power = std::int64_t{1} << bits;
    divisors.insert(divisors.end(), {power - 1, power});
    if (power < kLargest) divisors.push_back(power + 1);
    divisors.push_back(std::uniform_int_distribution<std::int64_t>(1, power)(generator));
  }
  for (const std::int64_t divisor : divisors) {
    for (int bits = 0; bits <= 31; ++bits) {
      const std::int64_t power = std::int64_t{1} << bits;
      check_around(divisor, power);
      check_around(divisor, power / divisor * divisor);
      check_around(divisor, std::uniform_int_distribution<std::int64_t>(0, kLargest)(generator) / divisor * divisor);
    }
    check_around(divisor, kLargest);
  }
}

}  // namespace
}  // namespace octavo::cuda
