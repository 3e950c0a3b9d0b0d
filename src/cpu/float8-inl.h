// float8e4m3fn caches by table: VBMI looks 64 codes up at once in 128 magnitudes, where the conversion by way of
// float16 (codecs-inl.h) takes 16. Values and the order of sums are those of stream-inl.h, and so are the bits.
//
// Included once per target by kernels.cc; empty but for AVX-512, where kernels.cc makes a second table with these.
#if HWY_TARGET == HWY_AVX3

// Highway's AVX-512 target has no VBMI; in these functions alone the compiler may use it.
HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512vnni,avx512vbmi")
static_assert(true, "the macro needs a semicolon on some compilers");
namespace octavo::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using ByteTag = hn::Repartition<std::uint8_t, FloatTag>;
using ByteVec = hn::Vec<ByteTag>;

// 32 bytes from each of two places.
HWY_INLINE ByteVec load_pair(const std::uint8_t* low, const std::uint8_t* high) {
  const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low));
  const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high));
  return ByteVec{_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1)};
}

// The magnitude of an e4m3 code in units of code_unit(), as the upper half of a float: exact, subnormals included.
constexpr std::uint16_t float8_magnitude(unsigned code) {
  if (code == 0x7F) return 0x7FF0;  // NaN
  unsigned exponent = code >> 3;
  unsigned mantissa = code & 7;
  if (code == 0) return 0;
  if (exponent == 0) {
    exponent = 1;
    for (; mantissa < 8; mantissa *= 2) --exponent;  // below 0 it wraps, and the sum below wraps back
  }
  return static_cast<std::uint16_t>((exponent + 127 - 7 - 8) << 7 | (mantissa & 7) << 4);
}

struct Float8Arrays {
  alignas(64) std::uint8_t low[128] = {};
  alignas(64) std::uint8_t high[128] = {};
  alignas(64) std::uint8_t order[64] = {};

  constexpr Float8Arrays() {
    for (unsigned code = 0; code < 128; ++code) {
      low[code] = static_cast<std::uint8_t>(float8_magnitude(code) & 0xFF);
      high[code] = static_cast<std::uint8_t>(float8_magnitude(code) >> 8);
    }
    // Byte order[i] of the stored ones is the i-th to be looked up: after the interleaves and shifts of decode(),
    // vector n has bytes 16n to 16n + 15.
    for (unsigned n = 0; n < 4; ++n) {
      for (unsigned i = 0; i < 16; ++i) {
        order[i / 4 * 16 + i % 4 * 2 + n % 2 + n / 2 * 8] = static_cast<std::uint8_t>(16 * n + i);
      }
    }
  }
};
inline constexpr Float8Arrays kFloat8Arrays;

class Float8Table {
 public:
  Float8Table() {
    for (std::size_t i = 0; i < 2; ++i) {
      low_[i] = hn::Load(ByteTag(), kFloat8Arrays.low + 64 * i);
      high_[i] = hn::Load(ByteTag(), kFloat8Arrays.high + 64 * i);
    }
    order_ = hn::Load(ByteTag(), kFloat8Arrays.order);
  }

  // values[n] = bytes 16n to 16n + 15 of `stored`.
  HWY_INLINE void decode(ByteVec stored, FloatVec (&values)[4]) const {
    const FloatTag d;
    const ByteTag d8;
    const hn::Rebind<std::uint32_t, FloatTag> d32;
    const ByteVec codes{_mm512_permutexvar_epi8(order_.raw, stored.raw)};
    const ByteVec low{_mm512_permutex2var_epi8(low_[0].raw, codes.raw, low_[1].raw)};
    const ByteVec magnitude{_mm512_permutex2var_epi8(high_[0].raw, codes.raw, high_[1].raw)};
    const ByteVec high = hn::OrAnd(magnitude, codes, hn::Set(d8, std::uint8_t{0x80}));
    const auto first = hn::BitCast(d32, hn::InterleaveLower(d8, low, high));
    const auto second = hn::BitCast(d32, hn::InterleaveUpper(d8, low, high));
    const auto upper_half = hn::Set(d32, 0xFFFF0000u);
    values[0] = hn::BitCast(d, hn::ShiftLeft<16>(first));
    values[1] = hn::BitCast(d, hn::And(first, upper_half));
    values[2] = hn::BitCast(d, hn::ShiftLeft<16>(second));
    values[3] = hn::BitCast(d, hn::And(second, upper_half));
  }

 private:
  ByteVec low_[2], high_[2], order_;
};

// As score_keys; width is a multiple of 32.
template <int kRows>
HWY_NOINLINE void score_float8(const float* query, std::int64_t width, const std::uint8_t* const* keys,
                               std::int64_t count, LineStream& ahead, float* scores) {
  const FloatTag d;
  const Float8Table table;
  LineStream lines = ahead;
  for (std::int64_t k = 0; k < count; k += 4) {
    FloatVec sum[kRows][4];
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < 4; ++i) sum[r][i] = hn::Zero(d);
    }
    for (std::int64_t c = 0; c < width; c += 2 * kChains) {
      lines.fetch<2>();
      FloatVec key[2][4];  // of each pair of keys: two vectors of the one, two of the other
      table.decode(load_pair(keys[k] + c, keys[k + 1] + c), key[0]);
      table.decode(load_pair(keys[k + 2] + c, keys[k + 3] + c), key[1]);
      for (int half = 0; half < 2; ++half) {
        for (int r = 0; r < kRows; ++r) {
          const FloatVec q = hn::Load(d, query + r * width + c + half * kChains);
          for (int i = 0; i < 4; ++i) sum[r][i] = hn::MulAdd(q, key[i / 2][i % 2 * 2 + half], sum[r][i]);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      hn::Store(sum_lanes(sum[r][0], sum[r][1], sum[r][2], sum[r][3]), ScoreTag(), scores + r * kTileKeys + k);
    }
  }
  ahead = lines;
}

// As value_keys, of the first `width` channels, a multiple of 64.
template <int kRows>
HWY_NOINLINE void value_float8(const float* weights, const std::uint8_t* const* values, std::int64_t begin,
                               std::int64_t end, std::int64_t width, std::int64_t stride, LineStream& ahead,
                               float* sums) {
  const FloatTag d;
  const Float8Table table;
  LineStream lines = ahead;
  for (std::int64_t column = 0; column < width; column += 4 * kChains) {
    FloatVec sum[kRows][4];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < 4; ++v) sum[r][v] = hn::Load(d, sums + r * stride + column + v * kChains);
    }
    for (std::int64_t k = begin; k < end; ++k) {
      lines.fetch<1>();
      FloatVec value[4];
      table.decode(hn::LoadU(ByteTag(), values[k] + column), value);
      for (int r = 0; r < kRows; ++r) {
        const FloatVec w = hn::Set(d, weights[r * kTileKeys + k]);
        for (int v = 0; v < 4; ++v) sum[r][v] = hn::MulAdd(w, value[v], sum[r][v]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < 4; ++v) hn::Store(sum[r][v], d, sums + r * stride + column + v * kChains);
    }
  }
  ahead = lines;
}

template <int kRows>
HWY_INLINE void value_float8_rows(const float* weights, const std::uint8_t* const* values, std::int64_t begin,
                                  std::int64_t end, std::int64_t stride, LineStream& ahead, float* sums) {
  const std::int64_t whole = stride / 64 * 64;
  value_float8<kRows>(weights, values, begin, end, whole, stride, ahead, sums);
  for (std::int64_t column = whole; column < stride; column += kChains) {
    value_keys<Float8Codec, kRows, 1>(weights, values, begin, end, column, stride, ahead, sums);
  }
}

inline void score_stream_float8(const QueryRows& query, std::int64_t rows, std::int64_t width,
                                const std::uint8_t* const* keys, std::int64_t count, LineStream& ahead, float* scores) {
  for (std::int64_t r = 0; r < rows; r += kScoreRows) {
    const float* q = query.floats + r * width;
    float* to = scores + r * kTileKeys;
    switch (std::min<std::int64_t>(rows - r, kScoreRows)) {
      case 1: score_float8<1>(q, width, keys, count, ahead, to); break;
      case 2: score_float8<2>(q, width, keys, count, ahead, to); break;
      case 3: score_float8<3>(q, width, keys, count, ahead, to); break;
      default: score_float8<kScoreRows>(q, width, keys, count, ahead, to); break;
    }
  }
}

inline void accumulate_stream_float8(float* weights, std::int64_t rows, const std::uint8_t* const* values,
                                     std::int64_t begin, std::int64_t end, std::int64_t, std::int64_t stride,
                                     LineStream& ahead, float* sums) {
  for (std::int64_t r = 0; r < rows; r += kBlockRows, weights += kBlockRows * kTileKeys, sums += kBlockRows * stride) {
    switch (std::min<std::int64_t>(rows - r, kBlockRows)) {
      case 1: value_float8_rows<1>(weights, values, begin, end, stride, ahead, sums); break;
      case 2: value_float8_rows<2>(weights, values, begin, end, stride, ahead, sums); break;
      case 3: value_float8_rows<3>(weights, values, begin, end, stride, ahead, sums); break;
      default: value_float8_rows<4>(weights, values, begin, end, stride, ahead, sums); break;
    }
  }
}

}  // namespace octavo::cpu::HWY_NAMESPACE
HWY_POP_ATTRIBUTES
static_assert(true, "the macro needs a semicolon on some compilers");

#endif  // HWY_TARGET == HWY_AVX3
