// Stored elements <-> float rows. A codec decodes codes without their scale and in units of code_unit(), which the
// kernels fold into Q (for K) and into the epilogue (for V). Included once per target by kernels.cc.

HWY_BEFORE_NAMESPACE();
namespace octavo::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = HWY_FULL(float);
using FloatVec = hn::Vec<FloatTag>;

// float16 bits to float, exact for every code. Highway's own emulation for 128-bit x86 knows no infinity and no NaN,
// and its opposite truncates, so that target does both here; the others have the instructions.
HWY_INLINE FloatVec float16_to_float(FloatTag d, hn::Vec<hn::Rebind<std::uint16_t, FloatTag>> bits) {
#if HWY_TARGET == HWY_SSE4
  const hn::Rebind<std::int32_t, FloatTag> d32;
  const auto wide = hn::PromoteTo(d32, bits);
  const auto magnitude = hn::And(wide, hn::Set(d32, 0x7FFF));
  const auto sign = hn::ShiftLeft<16>(hn::And(wide, hn::Set(d32, 0x8000)));
  const auto rebias = hn::Set(d32, 112 << 23);
  const auto normal = hn::Add(hn::ShiftLeft<13>(magnitude), rebias);
  const auto special = hn::Add(normal, rebias);  // exponent 31 becomes 255
  const auto subnormal = hn::Mul(hn::ConvertTo(d, magnitude), hn::Set(d, 1.0f / 16777216.0f));
  const auto is_special = hn::Gt(magnitude, hn::Set(d32, 0x7BFF));
  const auto is_subnormal = hn::Lt(magnitude, hn::Set(d32, 0x0400));
  const auto finite = hn::IfThenElse(is_subnormal, hn::BitCast(d32, subnormal), normal);
  return hn::BitCast(d, hn::Or(hn::IfThenElse(is_special, special, finite), sign));
#else
  const hn::Rebind<hwy::float16_t, FloatTag> df16;
  return hn::PromoteTo(d, hn::BitCast(df16, bits));
#endif
}

// The 4-bit codes of N lanes from N/2 bytes, one per byte: low nibble first.
HWY_INLINE hn::Vec<hn::Rebind<std::uint8_t, FloatTag>> load_nibbles(FloatTag, const std::uint8_t* from) {
  const hn::Rebind<std::uint8_t, FloatTag> d8;
  const hn::Half<decltype(d8)> half8;
  const hn::Rebind<std::uint16_t, decltype(half8)> half16;
  const auto pairs = hn::PromoteTo(half16, hn::LoadU(half8, from));
  const auto low = hn::And(pairs, hn::Set(half16, std::uint16_t{0x000F}));
  return hn::BitCast(d8, hn::OrAnd(low, hn::ShiftLeft<4>(pairs), hn::Set(half16, std::uint16_t{0x0F00})));
}

template <class Codec>
struct NibbleCodec {
  static constexpr std::size_t bytes(std::size_t n) { return n / 2; }
  static HWY_INLINE FloatVec load(FloatTag d, const std::uint8_t* from) {
    return Codec::decode(d, load_nibbles(d, from));
  }
};

struct Float32Codec {
  static constexpr std::size_t bytes(std::size_t n) { return 4 * n; }
  static HWY_INLINE FloatVec load(FloatTag d, const std::uint8_t* from) {
    return hn::LoadU(d, reinterpret_cast<const float*>(from));
  }
};

struct Float16Codec {
  static constexpr std::size_t bytes(std::size_t n) { return 2 * n; }
  static HWY_INLINE FloatVec load(FloatTag d, const std::uint8_t* from) {
    const hn::Rebind<std::uint16_t, FloatTag> d16;
    return float16_to_float(d, hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(from)));
  }
};

struct BFloat16Codec {
  static constexpr std::size_t bytes(std::size_t n) { return 2 * n; }
  static HWY_INLINE FloatVec load(FloatTag d, const std::uint8_t* from) {
    const hn::Rebind<std::uint16_t, FloatTag> d16;
    const hn::Rebind<std::uint32_t, FloatTag> d32;
    const auto bits = hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(from)));
    return hn::BitCast(d, hn::ShiftLeft<16>(bits));
  }
};

struct Int8Codec {
  static constexpr std::size_t bytes(std::size_t n) { return n; }
  static HWY_INLINE FloatVec load(FloatTag d, const std::uint8_t* from) {
    const hn::Rebind<std::int8_t, FloatTag> d8;
    const hn::Rebind<std::int32_t, FloatTag> d32;
    return hn::ConvertTo(d, hn::PromoteTo(d32, hn::LoadU(d8, reinterpret_cast<const std::int8_t*>(from))));
  }
};

// An e4m3 code moved into the fields of a float16 is the value times 2^-8, subnormals included, and float16 -> float32
// does not mind flush-to-zero modes. Of the NaN codes alone, the magnitude plus one reaches the exponent's highest bit,
// which makes them float16's.
struct Float8Codec {
  static constexpr std::size_t bytes(std::size_t n) { return n; }
  static HWY_INLINE FloatVec load(FloatTag d, const std::uint8_t* from) {
    const hn::Rebind<std::int8_t, FloatTag> d8;
    const hn::Rebind<std::int16_t, FloatTag> d16;
    const hn::RebindToUnsigned<decltype(d16)> du16;
    const auto code = hn::BitCast(du16, hn::PromoteTo(d16, hn::LoadU(d8, reinterpret_cast<const std::int8_t*>(from))));
    const auto number = hn::And(hn::ShiftLeft<7>(code), hn::Set(du16, std::uint16_t{0xBF80}));
    const auto next = hn::Add(number, hn::Set(du16, std::uint16_t{0x0080}));
    return float16_to_float(d, hn::OrAnd(number, next, hn::Set(du16, std::uint16_t{0x4000})));
  }
};

using NibbleVec = hn::Vec<hn::Rebind<std::uint8_t, FloatTag>>;

struct Int4Codec : NibbleCodec<Int4Codec> {
  static HWY_INLINE FloatVec decode(FloatTag d, NibbleVec codes) {
    const hn::Rebind<std::int32_t, FloatTag> d32;
    return hn::ConvertTo(d, hn::Sub(hn::PromoteTo(d32, codes), hn::Set(d32, 8)));
  }
};

// As Float8Codec: an e2m1 code in the fields of a float16 is the value times 2^-14.
struct Float4Codec : NibbleCodec<Float4Codec> {
  static HWY_INLINE FloatVec decode(FloatTag d, NibbleVec codes) {
    const hn::Rebind<std::uint16_t, FloatTag> d16;
    const auto code = hn::PromoteTo(d16, codes);
    const auto magnitude = hn::ShiftLeft<9>(hn::And(code, hn::Set(d16, std::uint16_t{7})));
    return float16_to_float(d, hn::OrAnd(magnitude, hn::ShiftLeft<12>(code), hn::Set(d16, std::uint16_t{0x8000})));
  }
};

// n elements to floats; reads exactly the row's bytes and writes exactly n floats. n may be odd only for types of whole
// bytes.
template <class Codec>
HWY_NOINLINE void decode_row(const void* from, std::int64_t count, float* to) {
  const FloatTag d;
  const std::size_t lanes = hn::Lanes(d);
  const std::size_t n = static_cast<std::size_t>(count);
  const auto* source = static_cast<const std::uint8_t*>(from);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(Codec::load(d, source + Codec::bytes(i)), d, to + i);
  if (i < n) {
    alignas(64) std::uint8_t tail[64] = {};
    alignas(64) float decoded[16];
    std::memcpy(tail, source + Codec::bytes(i), Codec::bytes(n - i));
    hn::StoreU(Codec::load(d, tail), d, decoded);
    std::memcpy(to + i, decoded, (n - i) * sizeof(float));
  }
}

using DecodeRow = void (*)(const void* from, std::int64_t count, float* to);

HWY_INLINE DecodeRow decoder(CacheType type) {
  switch (type) {
    case CacheType::kFloat16: return decode_row<Float16Codec>;
    case CacheType::kBFloat16: return decode_row<BFloat16Codec>;
    case CacheType::kInt8: return decode_row<Int8Codec>;
    case CacheType::kFloat8E4M3FN: return decode_row<Float8Codec>;
    case CacheType::kInt4: return decode_row<Int4Codec>;
    case CacheType::kFloat4E2M1: return decode_row<Float4Codec>;
    case CacheType::kFloat32:
    case CacheType::kTensorType: break;
  }
  return decode_row<Float32Codec>;
}

HWY_INLINE DecodeRow decoder(ElementType type) {
  if (type == ElementType::kFloat16) return decode_row<Float16Codec>;
  return type == ElementType::kBFloat16 ? decode_row<BFloat16Codec> : decode_row<Float32Codec>;
}

// float -> float16 bits, round to nearest even.
HWY_INLINE void encode_float16_row(const float* from, std::int64_t count, std::uint16_t* to) {
  std::int64_t i = 0;
#if HWY_TARGET != HWY_SSE4
  const FloatTag d;
  const hn::Rebind<std::uint16_t, FloatTag> d16;
  const hn::Rebind<hwy::float16_t, FloatTag> df16;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(hn::BitCast(d16, hn::DemoteTo(df16, hn::LoadU(d, from + i))), d16, to + i);
  }
#endif
  for (; i < count; ++i) to[i] = encode_float16(from[i]);
}

// A float row to T or to an unquantised cache row.
HWY_INLINE void encode_row(ElementType type, const float* from, std::int64_t count, std::byte* to) {
  if (type == ElementType::kFloat32) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
  } else if (type == ElementType::kFloat16) {
    encode_float16_row(from, count, reinterpret_cast<std::uint16_t*>(to));
  } else {
    auto* bits = reinterpret_cast<std::uint16_t*>(to);
    for (std::int64_t i = 0; i < count; ++i) bits[i] = encode_bfloat16(from[i]);
  }
}

// A float row to cache row `head`, quantised as the contract says: code = round_half_even(x / scale), saturated.
HWY_INLINE void encode_cache_row(const Cache& cache, std::int64_t head, std::int64_t head_size, float* row,
                                 std::byte* to) {
  if (cache.scale != nullptr) {
    const float* scale = cache.per_channel ? cache.scale + head * head_size : cache.scale;
    for (std::int64_t i = 0; i < head_size; ++i) row[i] /= scale[cache.per_channel ? i : 0];
  }
  auto* bytes = reinterpret_cast<std::uint8_t*>(to);
  switch (cache.type) {
    case CacheType::kFloat16: encode_row(ElementType::kFloat16, row, head_size, to); return;
    case CacheType::kBFloat16: encode_row(ElementType::kBFloat16, row, head_size, to); return;
    case CacheType::kInt8:
      for (std::int64_t i = 0; i < head_size; ++i) bytes[i] = static_cast<std::uint8_t>(encode_int8(row[i]));
      return;
    case CacheType::kFloat8E4M3FN:
      for (std::int64_t i = 0; i < head_size; ++i) bytes[i] = encode_float8(row[i]);
      return;
    case CacheType::kInt4:
    case CacheType::kFloat4E2M1: {
      const auto encode = cache.type == CacheType::kInt4 ? encode_int4 : encode_float4;
      for (std::int64_t i = 0; i < head_size; i += 2) {
        bytes[i / 2] = static_cast<std::uint8_t>(encode(row[i]) | encode(row[i + 1]) << 4);
      }
      return;
    }
    case CacheType::kFloat32:
    case CacheType::kTensorType: encode_row(ElementType::kFloat32, row, head_size, to); return;
  }
}

}  // namespace octavo::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
