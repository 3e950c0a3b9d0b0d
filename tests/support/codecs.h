// The number formats of the operator, as the tests understand them: slow, written from the formats' definitions, and
// shared with nothing under src/. codecs_test.cc checks them exhaustively.
#pragma once

#include <cstdint>

#include "octavo/problem.h"
#include "octavo/tensor_view.h"

namespace octavo::testing {

// One code of `format` as a number. Codes: the bits of a float format; the two's complement byte of int8; the stored
// nibble of a 4-bit format (int4 is biased by 8). `format` is never kTensorType.
double decode(CacheType format, std::uint32_t code);

// The code nearest to `value`, ties to even. Integers, e4m3 and e2m1 saturate; float16 and bfloat16 overflow to
// infinity, as IEEE 754 says. NaN becomes the format's NaN; a format without NaN gives an arbitrary code.
std::uint32_t encode(CacheType format, double value);

// Whether `code` is a NaN of `format`.
bool is_nan(CacheType format, std::uint32_t code);

// Number of distinct codes; float32 has too many to list and gives 0.
std::uint32_t code_count(CacheType format);

// The unit roundoff of a float format (2^-24 for float32, 2^-11, 2^-8, 2^-4, 2^-2) and its smallest positive value.
double unit_roundoff(CacheType format);
double smallest_positive(CacheType format);

// What the elements of a plain tensor mean.
CacheType format_of(ElementType type);
// What stores a cache of `format`.
ElementType storage_of(CacheType format);
bool is_four_bit(CacheType format);
bool is_quantized(CacheType format);  // needs a scale

// Element `index` of the row that starts at `row`, and its replacement; 4-bit formats keep the other nibble.
std::uint32_t load_code(CacheType format, const void* row, std::int64_t index);
void store_code(CacheType format, void* row, std::int64_t index, std::uint32_t code);

inline double load(CacheType format, const void* row, std::int64_t index) {
  return decode(format, load_code(format, row, index));
}
inline void store(CacheType format, void* row, std::int64_t index, double value) {
  store_code(format, row, index, encode(format, value));
}

// A code that nothing may read: NaN where the format has one, else an extreme value; `salt` varies sign and payload.
std::uint32_t poison_code(CacheType format, std::uint64_t salt);

}  // namespace octavo::testing
