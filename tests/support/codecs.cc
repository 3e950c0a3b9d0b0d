#include "support/codecs.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace octavo::testing {
namespace {

// A binary float format: sign, exponent, mantissa.
struct FloatFormat {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  bool has_infinity;       // IEEE: the top exponent is for infinity and NaN
  std::uint32_t nan_code;  // 0: the format has no NaN
  double max_finite;
};

FloatFormat float_format(CacheType format) {
  switch (format) {
    case CacheType::kFloat16: return {5, 10, 15, true, 0x7E00u, 65504.0};
    case CacheType::kBFloat16: return {8, 7, 127, true, 0x7FC0u, std::ldexp(255.0, 120)};
    case CacheType::kFloat8E4M3FN: return {4, 3, 7, false, 0x7Fu, 448.0};
    case CacheType::kFloat4E2M1: return {2, 1, 1, false, 0u, 6.0};
    default: return {8, 23, 127, true, 0x7FC00000u, static_cast<double>(std::numeric_limits<float>::max())};
  }
}

bool is_integer(CacheType format) {
  return format == CacheType::kInt8 || format == CacheType::kInt4;
}

double decode_float(const FloatFormat& f, std::uint32_t code) {
  const std::uint32_t mantissa = code & ((1u << f.mantissa_bits) - 1u);
  const std::uint32_t exponent = (code >> f.mantissa_bits) & ((1u << f.exponent_bits) - 1u);
  const bool negative = ((code >> (f.mantissa_bits + f.exponent_bits)) & 1u) != 0;
  const std::uint32_t top = (1u << f.exponent_bits) - 1u;
  double magnitude = 0.0;
  if (f.has_infinity && exponent == top) {
    magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  } else if (f.nan_code != 0 && (code & ~(1u << (f.mantissa_bits + f.exponent_bits))) == f.nan_code) {
    magnitude = std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<double>(mantissa), 1 - f.bias - f.mantissa_bits);
  } else {
    magnitude = std::ldexp(static_cast<double>(mantissa + (1u << f.mantissa_bits)),
                           static_cast<int>(exponent) - f.bias - f.mantissa_bits);
  }
  return negative ? -magnitude : magnitude;
}

std::uint32_t encode_float(const FloatFormat& f, double value) {
  const std::uint32_t sign = std::signbit(value) ? 1u << (f.mantissa_bits + f.exponent_bits) : 0u;
  if (std::isnan(value)) return f.nan_code;
  const double magnitude = std::fabs(value);
  const int min_exponent = 1 - f.bias;
  int exponent = min_exponent;
  if (magnitude >= std::ldexp(1.0, min_exponent)) exponent = std::isinf(magnitude) ? 1024 : std::ilogb(magnitude);
  // In units of the last place of this binade; nearbyint rounds half to even.
  double units = std::nearbyint(std::ldexp(magnitude, f.mantissa_bits - exponent));
  if (std::isinf(magnitude) || std::ldexp(units, exponent - f.mantissa_bits) > f.max_finite) {
    const std::uint32_t infinity = ((1u << f.exponent_bits) - 1u) << f.mantissa_bits;
    return sign | (f.has_infinity ? infinity : encode_float(f, f.max_finite));
  }
  if (units >= std::ldexp(1.0, f.mantissa_bits + 1)) {
    units /= 2.0;
    ++exponent;
  }
  const auto integer = static_cast<std::uint32_t>(units);
  const std::uint32_t hidden = 1u << f.mantissa_bits;
  if (integer < hidden) return sign | integer;  // subnormal or zero
  return sign | (static_cast<std::uint32_t>(exponent + f.bias) << f.mantissa_bits) | (integer - hidden);
}

double decode_slowly(CacheType format, std::uint32_t code) {
  if (format == CacheType::kInt8) return static_cast<double>(static_cast<std::int8_t>(code & 0xFFu));
  if (format == CacheType::kInt4) return static_cast<double>(code & 0xFu) - 8.0;
  return decode_float(float_format(format), code);
}

// Every value of a format that has few enough codes.
const std::vector<double>& values_of(CacheType format) {
  static const auto* const tables = [] {
    auto* const made = new std::array<std::vector<double>, 8>;
    for (std::size_t i = 0; i < made->size(); ++i) {
      const auto type = static_cast<CacheType>(i);
      for (std::uint32_t code = 0; code < code_count(type); ++code) (*made)[i].push_back(decode_slowly(type, code));
    }
    return made;
  }();
  return (*tables)[static_cast<std::size_t>(format)];
}

}  // namespace

double decode(CacheType format, std::uint32_t code) {
  const std::vector<double>& values = values_of(format);
  if (values.empty()) return static_cast<double>(std::bit_cast<float>(code));
  return values[code];
}

std::uint32_t encode(CacheType format, double value) {
  if (is_integer(format)) {
    const double low = format == CacheType::kInt8 ? -128.0 : -8.0;
    const double rounded = std::isnan(value) ? 0.0 : std::nearbyint(value);
    const double q = std::fmin(std::fmax(rounded, low), -low - 1.0);
    if (format == CacheType::kInt8) return static_cast<std::uint8_t>(static_cast<std::int8_t>(q));
    return static_cast<std::uint32_t>(q + 8.0);
  }
  return encode_float(float_format(format), value);
}

bool is_nan(CacheType format, std::uint32_t code) {
  return std::isnan(decode(format, code));
}

std::uint32_t code_count(CacheType format) {
  switch (format) {
    case CacheType::kFloat16:
    case CacheType::kBFloat16: return 1u << 16;
    case CacheType::kInt8:
    case CacheType::kFloat8E4M3FN: return 1u << 8;
    case CacheType::kInt4:
    case CacheType::kFloat4E2M1: return 1u << 4;
    default: return 0;
  }
}

double unit_roundoff(CacheType format) {
  return std::ldexp(1.0, -float_format(format).mantissa_bits - 1);
}

double smallest_positive(CacheType format) {
  const FloatFormat f = float_format(format);
  return std::ldexp(1.0, 1 - f.bias - f.mantissa_bits);
}

CacheType format_of(ElementType type) {
  switch (type) {
    case ElementType::kFloat16: return CacheType::kFloat16;
    case ElementType::kBFloat16: return CacheType::kBFloat16;
    case ElementType::kFloat8E4M3FN: return CacheType::kFloat8E4M3FN;
    case ElementType::kInt8: return CacheType::kInt8;
    default: return CacheType::kFloat32;
  }
}

ElementType storage_of(CacheType format) {
  switch (format) {
    case CacheType::kFloat16: return ElementType::kFloat16;
    case CacheType::kBFloat16: return ElementType::kBFloat16;
    case CacheType::kInt8: return ElementType::kInt8;
    case CacheType::kFloat8E4M3FN: return ElementType::kFloat8E4M3FN;
    case CacheType::kInt4:
    case CacheType::kFloat4E2M1: return ElementType::kUint8;
    default: return ElementType::kFloat32;
  }
}

bool is_four_bit(CacheType format) {
  return format == CacheType::kInt4 || format == CacheType::kFloat4E2M1;
}

bool is_quantized(CacheType format) {
  return is_four_bit(format) || format == CacheType::kInt8 || format == CacheType::kFloat8E4M3FN;
}

std::uint32_t load_code(CacheType format, const void* row, std::int64_t index) {
  const auto* bytes = static_cast<const unsigned char*>(row);
  if (is_four_bit(format)) {
    const std::uint32_t pair = bytes[index / 2];
    return index % 2 == 0 ? pair & 0xFu : pair >> 4;
  }
  const std::size_t width = size_in_bytes(storage_of(format));
  std::uint32_t code = 0;
  for (std::size_t i = 0; i < width; ++i) {
    code |= static_cast<std::uint32_t>(bytes[static_cast<std::size_t>(index) * width + i]) << (8 * i);  // little endian
  }
  return code;
}

void store_code(CacheType format, void* row, std::int64_t index, std::uint32_t code) {
  auto* bytes = static_cast<unsigned char*>(row);
  if (is_four_bit(format)) {
    unsigned char& pair = bytes[index / 2];
    pair = static_cast<unsigned char>(index % 2 == 0 ? (pair & 0xF0u) | (code & 0xFu) : (pair & 0x0Fu) | (code << 4));
    return;
  }
  const std::size_t width = size_in_bytes(storage_of(format));
  for (std::size_t i = 0; i < width; ++i) {
    bytes[static_cast<std::size_t>(index) * width + i] = static_cast<unsigned char>(code >> (8 * i));
  }
}

std::uint32_t poison_code(CacheType format, std::uint64_t salt) {
  const bool odd = (salt & 1u) != 0;
  const auto payload = static_cast<std::uint32_t>(salt >> 1);
  switch (format) {
    case CacheType::kFloat16: return (odd ? 0xFE00u : 0x7E00u) | (payload & 0x1FFu);
    case CacheType::kBFloat16: return (odd ? 0xFFC0u : 0x7FC0u) | (payload & 0x3Fu);
    case CacheType::kFloat8E4M3FN: return odd ? 0xFFu : 0x7Fu;
    case CacheType::kInt8: return odd ? 0x80u : 0x7Fu;
    case CacheType::kInt4: return odd ? 0x0u : 0xFu;
    case CacheType::kFloat4E2M1: return odd ? 0x7u : 0xFu;
    default: return (odd ? 0xFFC00000u : 0x7FC00000u) | (payload & 0x3FFFFFu);
  }
}

}  // namespace octavo::testing
