// Risk: a test codec that is wrong in the same way as the library's would hide the fault. Every code of every format is
// checked against the definition of the format, without reference to the codec's own arithmetic.
#include "support/codecs.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "support/random.h"

namespace octavo::testing {
namespace {

constexpr CacheType kListed[] = {CacheType::kFloat16,      CacheType::kBFloat16, CacheType::kInt8,
                                 CacheType::kFloat8E4M3FN, CacheType::kInt4,     CacheType::kFloat4E2M1};

TEST(Codecs, LandmarksOfEachFormat) {
  EXPECT_EQ(decode(CacheType::kFloat16, 0x3C00), 1.0);
  EXPECT_EQ(decode(CacheType::kFloat16, 0x0001), std::ldexp(1.0, -24));
  EXPECT_EQ(decode(CacheType::kFloat16, 0x0400), std::ldexp(1.0, -14));
  EXPECT_EQ(decode(CacheType::kFloat16, 0x7BFF), 65504.0);
  EXPECT_EQ(decode(CacheType::kFloat16, 0xC000), -2.0);
  EXPECT_EQ(decode(CacheType::kFloat16, 0x7C00), std::numeric_limits<double>::infinity());
  EXPECT_EQ(decode(CacheType::kFloat8E4M3FN, 0x7E), 448.0);
  EXPECT_EQ(decode(CacheType::kFloat8E4M3FN, 0x38), 1.0);
  EXPECT_EQ(decode(CacheType::kFloat8E4M3FN, 0x01), std::ldexp(1.0, -9));
  EXPECT_TRUE(std::isnan(decode(CacheType::kFloat8E4M3FN, 0x7F)));
  EXPECT_TRUE(std::isnan(decode(CacheType::kFloat8E4M3FN, 0xFF)));
  EXPECT_EQ(decode(CacheType::kInt8, 0x80), -128.0);
  EXPECT_EQ(decode(CacheType::kInt4, 0x0), -8.0);
  EXPECT_EQ(decode(CacheType::kInt4, 0xF), 7.0);
  constexpr double kE2M1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (std::uint32_t code = 0; code < 8; ++code) {
    EXPECT_EQ(decode(CacheType::kFloat4E2M1, code), kE2M1[code]);
    EXPECT_EQ(decode(CacheType::kFloat4E2M1, code + 8), -kE2M1[code]);
  }
}

TEST(Codecs, BFloat16IsTheUpperHalfOfFloat32) {
  for (std::uint32_t code = 0; code < 1u << 16; ++code) {
    const float value = std::bit_cast<float>(code << 16);
    if (std::isnan(value)) {
      EXPECT_TRUE(is_nan(CacheType::kBFloat16, code));
    } else {
      ASSERT_EQ(decode(CacheType::kBFloat16, code), static_cast<double>(value)) << code;
    }
  }
}

TEST(Codecs, Float32IsTheMachinesOwn) {
  Random random(7);
  for (int i = 0; i < 100000; ++i) {
    const auto code = static_cast<std::uint32_t>(random.next());
    const float value = std::bit_cast<float>(code);
    if (std::isnan(value)) continue;
    ASSERT_EQ(decode(CacheType::kFloat32, code), static_cast<double>(value)) << code;
    ASSERT_EQ(encode(CacheType::kFloat32, static_cast<double>(value)), code) << value;
    const double other = normal(random.next()) * std::ldexp(1.0, static_cast<int>(random.between(-150, 127)));
    ASSERT_EQ(encode(CacheType::kFloat32, other), std::bit_cast<std::uint32_t>(static_cast<float>(other))) << other;
  }
}

// The finite values of a format that are not negative, in increasing order: codes of sign-magnitude formats are.
std::vector<std::uint32_t> increasing_codes(CacheType format) {
  std::vector<std::uint32_t> codes;
  if (format == CacheType::kInt8) {
    for (int q = -128; q <= 127; ++q) codes.push_back(static_cast<std::uint8_t>(q));
  } else if (format == CacheType::kInt4) {
    for (std::uint32_t code = 0; code < 16; ++code) codes.push_back(code);
  } else {
    for (std::uint32_t code = 0; code < code_count(format) / 2; ++code) {
      if (std::isfinite(decode(format, code))) codes.push_back(code);
    }
  }
  return codes;
}

TEST(Codecs, RoundsToNearestAndTiesToEven) {
  for (const CacheType format : kListed) {
    const std::vector<std::uint32_t> codes = increasing_codes(format);
    for (std::size_t i = 0; i + 1 < codes.size(); ++i) {
      const double low = decode(format, codes[i]);
      const double high = decode(format, codes[i + 1]);
      ASSERT_LT(low, high) << name(format) << " code " << codes[i];
      ASSERT_EQ(encode(format, low), codes[i]);
      const double middle = (low + high) / 2.0;
      ASSERT_EQ(encode(format, std::nextafter(middle, low)), codes[i]) << name(format) << " below " << middle;
      ASSERT_EQ(encode(format, std::nextafter(middle, high)), codes[i + 1]) << name(format) << " above " << middle;
      // Even: of the mantissa, hence of the code (int4 is stored with an even offset).
      const std::uint32_t even = codes[i] % 2 == 0 ? codes[i] : codes[i + 1];
      ASSERT_EQ(encode(format, middle), even) << name(format) << " at " << middle;
    }
  }
}

TEST(Codecs, NegativeValuesMirrorPositiveOnes) {
  for (const CacheType format : {CacheType::kFloat16, CacheType::kBFloat16, CacheType::kFloat8E4M3FN}) {
    const std::uint32_t sign = code_count(format) / 2;
    for (const std::uint32_t code : increasing_codes(format)) {
      ASSERT_EQ(encode(format, -decode(format, code)), code | sign) << name(format) << " code " << code;
    }
  }
}

TEST(Codecs, SaturatesOrOverflows) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double huge : {1e30, kInfinity}) {
    EXPECT_EQ(decode(CacheType::kInt8, encode(CacheType::kInt8, huge)), 127.0);
    EXPECT_EQ(decode(CacheType::kInt8, encode(CacheType::kInt8, -huge)), -128.0);
    EXPECT_EQ(decode(CacheType::kInt4, encode(CacheType::kInt4, huge)), 7.0);
    EXPECT_EQ(decode(CacheType::kInt4, encode(CacheType::kInt4, -huge)), -8.0);
    EXPECT_EQ(decode(CacheType::kFloat8E4M3FN, encode(CacheType::kFloat8E4M3FN, huge)), 448.0);
    EXPECT_EQ(decode(CacheType::kFloat8E4M3FN, encode(CacheType::kFloat8E4M3FN, -huge)), -448.0);
    EXPECT_EQ(decode(CacheType::kFloat4E2M1, encode(CacheType::kFloat4E2M1, huge)), 6.0);
    EXPECT_EQ(decode(CacheType::kFloat16, encode(CacheType::kFloat16, huge)), kInfinity);
  }
  EXPECT_EQ(decode(CacheType::kFloat16, encode(CacheType::kFloat16, 65519.99)), 65504.0);
  EXPECT_EQ(decode(CacheType::kFloat16, encode(CacheType::kFloat16, 65520.0)), kInfinity);
  EXPECT_EQ(decode(CacheType::kFloat8E4M3FN, encode(CacheType::kFloat8E4M3FN, 464.1)), 448.0);
}

TEST(Codecs, RowsOfNibbles) {
  unsigned char row[2] = {0xFF, 0xFF};
  for (std::int64_t i = 0; i < 3; ++i) store_code(CacheType::kInt4, row, i, static_cast<std::uint32_t>(i + 1));
  EXPECT_EQ(row[0], 0x21);
  EXPECT_EQ(row[1], 0xF3);
  EXPECT_EQ(load_code(CacheType::kInt4, row, 1), 2u);
  EXPECT_EQ(load_code(CacheType::kInt4, row, 3), 15u);
}

TEST(Codecs, PoisonIsNaNWhereTheFormatHasOne) {
  for (const CacheType format :
       {CacheType::kFloat32, CacheType::kFloat16, CacheType::kBFloat16, CacheType::kFloat8E4M3FN}) {
    for (std::uint64_t salt = 0; salt < 64; ++salt) EXPECT_TRUE(is_nan(format, poison_code(format, mix(salt))));
  }
}

}  // namespace
}  // namespace octavo::testing
