// Division by a number that the host knows.
#pragma once

#include <cstdint>

#include "cuda/call.h"

namespace octavo::cuda {

// n / divisor for 0 <= n < 2^31 and a divisor from 1 to 2^31, by a multiplication and a shift (Granlund and Montgomery,
// 1994, theorem 4.2).
struct Quotient {
  std::uint32_t factor = 0;  // 2^(31 + l) / divisor, rounded up, with l the bits of divisor - 1; 0 for a divisor of 1
  std::uint32_t shift = 0;   // l - 1

  Quotient() = default;
  explicit Quotient(std::int64_t divisor) {
    if (divisor == 1) return;
    std::uint32_t bits = 1;
    while ((std::int64_t{1} << bits) < divisor) ++bits;
    factor = static_cast<std::uint32_t>(((std::int64_t{1} << (31 + bits)) + divisor - 1) / divisor);
    shift = bits - 1;
  }

  OCTAVO_HOST_DEVICE std::int32_t of(std::int32_t n) const {
    const auto high = static_cast<std::uint32_t>(std::uint64_t{factor} * static_cast<std::uint32_t>(n) >> 32);
    return factor == 0 ? n : static_cast<std::int32_t>(high >> shift);
  }
};

}  // namespace octavo::cuda
