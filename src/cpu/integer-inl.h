// int8 and int4 caches without a float in the loops: Q and the weights of V become fixed point of 24 bits in three 8-bit
// pieces, and VNNI multiplies codes by pieces, 64 products an instruction, into 32-bit sums that are exact. Sums without
// rounding have no order, so tiles of any number of rows use these kernels and a row has the same bits in all of them.
// Why 24 bits and what they cost in accuracy: docs/decisions/0011-integer-products-on-vnni.md.
//
// Included once per target by kernels.cc; empty but for AVX-512, where kernels.cc makes a second table with these.
#if HWY_TARGET == HWY_AVX3

// Highway's AVX-512 target has no VNNI; in these functions alone the compiler may use it.
HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512vnni")
static_assert(true, "the macro needs a semicolon on some compilers");
namespace octavo::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using IntTag = hn::Rebind<std::int32_t, FloatTag>;
using ByteTag = hn::Repartition<std::uint8_t, FloatTag>;
using IntVec = hn::Vec<IntTag>;
using ByteVec = hn::Vec<ByteTag>;

inline constexpr int kPieces = 3;  // lowest first

// Four bytes of each piece, then four unused ones: the numbers of four channels (of Q) or four keys (of weights), as
// many bytes as the floats that they replace.
inline constexpr std::int64_t kPieceBytes = 4;
inline constexpr std::int64_t kGroupBytes = 16;

// The largest piece is 127, and 255 units are left for the roundings of the division and of the product.
inline constexpr float kQuerySteps = 8355584.0f;
inline constexpr float kWeightSteps = 16777215.0f;
// Rows of Q with nothing above this stay floats: the inverse of their unit would overflow.
inline constexpr float kSmallestSplit = 0x1.0p-100f;

// sums + the products of unsigned and signed bytes, four in each lane.
HWY_INLINE IntVec add_products(IntVec sums, ByteVec unsigned_bytes, ByteVec signed_bytes) {
  return IntVec{_mm512_dpbusd_epi32(sums.raw, unsigned_bytes.raw, signed_bytes.raw)};
}

HWY_INLINE ByteVec same_four_bytes(const void* from) {
  std::int32_t four;
  std::memcpy(&four, from, sizeof(four));
  return hn::BitCast(ByteTag(), hn::Set(IntTag(), four));
}

// Of four integers, all lowest bytes, then all next ones, and so on.
HWY_INLINE ByteVec transpose_pieces(IntVec integers) {
  alignas(16) static constexpr std::uint8_t kOrder[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  return hn::TableLookupBytes(hn::BitCast(ByteTag(), integers), hn::LoadDup128(ByteTag(), kOrder));
}

// The codes of 16 keys and as many channels as four bytes hold, and what a code's unsigned byte is above it.
struct Int8Integers {
  static constexpr int kVectors = 1;  // of operands that a vector of stored bytes becomes
  static constexpr std::int32_t kOffset = 128;
  static constexpr std::int64_t bytes(std::int64_t channels) { return channels; }
  static HWY_INLINE void unsigned_codes(ByteVec stored, ByteVec (&codes)[kVectors]) {
    codes[0] = hn::Xor(stored, hn::Set(ByteTag(), std::uint8_t{0x80}));
  }
  static HWY_INLINE void signed_codes(ByteVec stored, ByteVec (&codes)[kVectors]) { codes[0] = stored; }
  // Channels of Q in the order in which operands hold them.
  static HWY_INLINE FloatVec in_order(FloatVec channels) { return channels; }
};

struct Int4Integers {
  static constexpr int kVectors = 2;  // low nibbles (even channels), high ones
  static constexpr std::int32_t kOffset = 8;
  static constexpr std::int64_t bytes(std::int64_t channels) { return channels / 2; }
  static HWY_INLINE void unsigned_codes(ByteVec stored, ByteVec (&codes)[kVectors]) {
    const ByteVec nibble = hn::Set(ByteTag(), std::uint8_t{0x0F});
    const hn::Repartition<std::uint16_t, ByteTag> d16;
    codes[0] = hn::And(stored, nibble);
    codes[1] = hn::And(hn::BitCast(ByteTag(), hn::ShiftRight<4>(hn::BitCast(d16, stored))), nibble);
  }
  static HWY_INLINE void signed_codes(ByteVec stored, ByteVec (&codes)[kVectors]) {
    unsigned_codes(stored, codes);
    for (ByteVec& code : codes) code = hn::Sub(code, hn::Set(ByteTag(), std::uint8_t{kOffset}));
  }
  static HWY_INLINE FloatVec in_order(FloatVec channels) {
    alignas(64) static constexpr std::int32_t kOrder[16] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
    return hn::TableLookupLanes(channels, hn::SetTableIndices(FloatTag(), kOrder));
  }
};

// Turns a row of Q into pieces, in place: q = unit * (lowest + 256 * middle + 65536 * highest), pieces from -128 to 127.
// A row with a number that is not finite, or with none large enough to be divided by, stays as it is.
template <class Codec>
HWY_INLINE QuerySplit split_query(std::int64_t width, float* row) {
  const FloatTag d;
  const IntTag di;
  QuerySplit split;
  FloatVec largest = hn::Zero(d);
  for (std::int64_t c = 0; c < width; c += kChains) largest = hn::Max(largest, hn::Abs(hn::Load(d, row + c)));
  const float magnitude = hn::GetLane(hn::MaxOfLanes(d, largest));
  if (has_non_finite(row, width) || (magnitude != 0.0f && magnitude < kSmallestSplit)) return split;
  split.unit = magnitude / kQuerySteps;
  const FloatVec steps = hn::Set(d, magnitude == 0.0f ? 0.0f : kQuerySteps / magnitude);
  IntVec sums = hn::Zero(di);
  const ByteVec ones = hn::Set(ByteTag(), std::uint8_t{1});
  const IntVec bias = hn::Set(di, 0x808080);  // with it, each byte is a piece + 128
  for (std::int64_t c = 0; c < width; c += kChains) {
    const FloatVec q = Codec::in_order(hn::Load(d, row + c));
    const ByteVec pieces = transpose_pieces(hn::Xor(hn::Add(hn::NearestInt(hn::Mul(q, steps)), bias), bias));
    sums = add_products(sums, ones, pieces);
    hn::Store(hn::BitCast(d, pieces), d, row + c);
  }
  alignas(64) std::int32_t lanes[kChains];
  hn::Store(sums, di, lanes);
  for (int p = 0; p < kPieces; ++p) {
    for (std::int64_t i = p; i < kChains; i += 4) split.sum[p] -= lanes[i];
    split.sum[p] *= Codec::kOffset;
  }
  return split;
}

// Four bytes of each of 16 keys a vector: bytes 16 to 0 of the keys' rows from `offset` on, four vectors.
HWY_INLINE void load_keys(const std::uint8_t* const* keys, std::int64_t offset, ByteVec (&of_keys)[4]) {
  IntVec rows[4];
  for (int i = 0; i < 4; ++i) {
    const auto row = [&](int block) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(keys[4 * block + i] + offset));
    };
    __m512i four = _mm512_broadcast_i32x4(row(0));
    four = _mm512_mask_broadcast_i32x4(four, 0x00F0, row(1));
    four = _mm512_mask_broadcast_i32x4(four, 0x0F00, row(2));
    four = _mm512_mask_broadcast_i32x4(four, 0xF000, row(3));
    rows[i] = IntVec{four};
  }
  const IntTag di;
  const hn::Repartition<std::uint64_t, IntTag> d64;
  const auto low01 = hn::BitCast(d64, hn::InterleaveLower(di, rows[0], rows[1]));
  const auto high01 = hn::BitCast(d64, hn::InterleaveUpper(di, rows[0], rows[1]));
  const auto low23 = hn::BitCast(d64, hn::InterleaveLower(di, rows[2], rows[3]));
  const auto high23 = hn::BitCast(d64, hn::InterleaveUpper(di, rows[2], rows[3]));
  of_keys[0] = hn::BitCast(ByteTag(), hn::InterleaveLower(d64, low01, low23));
  of_keys[1] = hn::BitCast(ByteTag(), hn::InterleaveUpper(d64, low01, low23));
  of_keys[2] = hn::BitCast(ByteTag(), hn::InterleaveLower(d64, high01, high23));
  of_keys[3] = hn::BitCast(ByteTag(), hn::InterleaveUpper(d64, high01, high23));
}

// scores[r][k] = q[r] . key k for kRows rows in pieces and `count` keys, a multiple of 16.
template <class Codec, int kRows>
HWY_NOINLINE void score_integers(const float* query, const QuerySplit* splits, std::int64_t width,
                                 const std::uint8_t* const* keys, std::int64_t count, LineStream& ahead,
                                 float* scores) {
  const FloatTag d;
  const IntTag di;
  const std::int64_t row_bytes = Codec::bytes(width);
  LineStream lines = ahead;
  for (std::int64_t k = 0; k < count; k += kChains) {
    IntVec sum[kRows][kPieces];
    for (int r = 0; r < kRows; ++r) {
      for (int p = 0; p < kPieces; ++p) sum[r][p] = hn::Set(di, splits[r].sum[p]);
    }
    const auto* pieces = reinterpret_cast<const std::uint8_t*>(query);
    for (std::int64_t offset = 0; offset < row_bytes; offset += kGroupBytes) {
      lines.fetch<4>();
      ByteVec stored[4];
      load_keys(keys + k, offset, stored);
      for (int i = 0; i < 4; ++i) {
        ByteVec codes[Codec::kVectors];
        Codec::unsigned_codes(stored[i], codes);
        for (int v = 0; v < Codec::kVectors; ++v, pieces += kGroupBytes) {
          for (int r = 0; r < kRows; ++r) {
            const std::uint8_t* of_row = pieces + r * width * kPieceBytes;
            for (int p = 0; p < kPieces; ++p) {
              sum[r][p] = add_products(sum[r][p], codes[v], same_four_bytes(of_row + p * kPieceBytes));
            }
          }
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      FloatVec score = hn::ConvertTo(d, sum[r][2]);
      const FloatVec lower = hn::MulAdd(hn::ConvertTo(d, sum[r][1]), hn::Set(d, 256.0f), hn::ConvertTo(d, sum[r][0]));
      score = hn::MulAdd(score, hn::Set(d, 65536.0f), lower);
      hn::Store(hn::Mul(score, hn::Set(d, splits[r].unit)), d, scores + r * kTileKeys + k);
    }
  }
  ahead = lines;
}

// As score_stream; rows that could not be split are multiplied as floats.
template <class Codec, class FloatCodec>
void score_stream_integers(const float* query, const QuerySplit* splits, std::int64_t rows, std::int64_t width,
                           const std::uint8_t* const* keys, std::int64_t count, LineStream& ahead, float* scores) {
  for (std::int64_t r = 0; r < rows; r += kScoreRows) {
    const float* q = query + r * width;
    float* to = scores + r * kTileKeys;
    switch (std::min<std::int64_t>(rows - r, kScoreRows)) {
      case 1: score_integers<Codec, 1>(q, splits + r, width, keys, count, ahead, to); break;
      case 2: score_integers<Codec, 2>(q, splits + r, width, keys, count, ahead, to); break;
      case 3: score_integers<Codec, 3>(q, splits + r, width, keys, count, ahead, to); break;
      default: score_integers<Codec, kScoreRows>(q, splits + r, width, keys, count, ahead, to); break;
    }
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    if (splits[r].is_split()) continue;
    score_keys<FloatCodec, 1>(query + r * width, width, keys, count, ahead, scores + r * kTileKeys);
  }
}

// Weights, from 0 to 1, to pieces of 0 to 255, in place; NaN, which the row's total keeps, to anything.
HWY_INLINE void split_weights(std::int64_t count, float* weights) {
  const FloatTag d;
  for (std::int64_t k = 0; k < count; k += kChains) {
    const IntVec steps = hn::NearestInt(hn::Mul(hn::Load(d, weights + k), hn::Set(d, kWeightSteps)));
    hn::Store(hn::BitCast(d, transpose_pieces(steps)), d, weights + k);
  }
}

// 64 bytes of rows: of one key each, or half of two keys that are four apart.
template <bool kTwoKeys>
HWY_INLINE ByteVec load_values(const std::uint8_t* const* values, std::int64_t offset) {
  if constexpr (kTwoKeys) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values[0] + offset));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values[4] + offset));
    return ByteVec{_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)};
  } else {
    return hn::LoadU(ByteTag(), values[0] + offset);
  }
}

template <bool kTwoKeys>
HWY_INLINE ByteVec same_weights(const std::uint8_t* group) {
  if constexpr (kTwoKeys) {
    std::int32_t low, high;
    std::memcpy(&low, group, sizeof(low));
    std::memcpy(&high, group + kGroupBytes, sizeof(high));
    return ByteVec{_mm512_mask_set1_epi32(_mm512_set1_epi32(low), 0xFF00, high)};
  } else {
    return same_four_bytes(group);
  }
}

// Four vectors of products' operands: four keys' codes of one channel in each lane. A row's bytes lie in blocks of 16,
// one a 128-bit block; int4 takes half of each (kHalf), which become as many channels.
template <class Codec, bool kTwoKeys, int kHalf>
HWY_INLINE void load_operands(const std::uint8_t* const* values, std::int64_t offset, ByteVec (&operands)[4]) {
  const ByteTag d8;
  const hn::Repartition<std::uint16_t, ByteTag> d16;
  ByteVec key[4];
  for (int i = 0; i < 4; ++i) key[i] = load_values<kTwoKeys>(values + i, offset);
  const auto interleave = [&](auto low01, auto low23, ByteVec* to) {
    const auto a = hn::BitCast(d16, low01);
    const auto b = hn::BitCast(d16, low23);
    to[0] = hn::BitCast(d8, hn::InterleaveLower(d16, a, b));
    to[1] = hn::BitCast(d8, hn::InterleaveUpper(d16, a, b));
  };
  if constexpr (Codec::kVectors == 1) {
    ByteVec stored[4];
    interleave(hn::InterleaveLower(d8, key[0], key[1]), hn::InterleaveLower(d8, key[2], key[3]), stored);
    interleave(hn::InterleaveUpper(d8, key[0], key[1]), hn::InterleaveUpper(d8, key[2], key[3]), stored + 2);
    for (int i = 0; i < 4; ++i) {
      ByteVec codes[1];
      Codec::signed_codes(stored[i], codes);
      operands[i] = codes[0];
    }
  } else {
    ByteVec stored[2];
    if constexpr (kHalf == 0) {
      interleave(hn::InterleaveLower(d8, key[0], key[1]), hn::InterleaveLower(d8, key[2], key[3]), stored);
    } else {
      interleave(hn::InterleaveUpper(d8, key[0], key[1]), hn::InterleaveUpper(d8, key[2], key[3]), stored);
    }
    for (int i = 0; i < 2; ++i) {
      ByteVec codes[2];
      Codec::signed_codes(stored[i], codes);
      operands[2 * i] = codes[0];
      operands[2 * i + 1] = codes[1];
    }
  }
}

// The four sums' 128-bit blocks, transposed: block i of every vector, in vector i.
HWY_INLINE void transpose_blocks(FloatVec (&v)[4]) {
  const __m512 low01 = _mm512_shuffle_f32x4(v[0].raw, v[1].raw, 0x44);
  const __m512 high01 = _mm512_shuffle_f32x4(v[0].raw, v[1].raw, 0xEE);
  const __m512 low23 = _mm512_shuffle_f32x4(v[2].raw, v[3].raw, 0x44);
  const __m512 high23 = _mm512_shuffle_f32x4(v[2].raw, v[3].raw, 0xEE);
  v[0] = FloatVec{_mm512_shuffle_f32x4(low01, low23, 0x88)};
  v[1] = FloatVec{_mm512_shuffle_f32x4(low01, low23, 0xDD)};
  v[2] = FloatVec{_mm512_shuffle_f32x4(high01, high23, 0x88)};
  v[3] = FloatVec{_mm512_shuffle_f32x4(high01, high23, 0xDD)};
}

// Adds the sums of load_operands()' channels to `sums`, whose first channel is the rows' byte `offset`.
template <class Codec, bool kTwoKeys, int kHalf>
HWY_INLINE void add_values(const IntVec (&sum)[kPieces][4], float* sums) {
  const FloatTag d;
  const IntTag di;
  FloatVec of_channels[4];
  for (int v = 0; v < 4; ++v) {
    IntVec lower = hn::Add(sum[0][v], hn::ShiftLeft<8>(sum[1][v]));  // 64 keys: below 2^30
    IntVec highest = sum[2][v];
    if constexpr (kTwoKeys) {
      lower = hn::Add(lower, hn::ConcatLowerUpper(di, lower, lower));
      highest = hn::Add(highest, hn::ConcatLowerUpper(di, highest, highest));
    }
    of_channels[v] = hn::MulAdd(hn::ConvertTo(d, highest), hn::Set(d, 65536.0f), hn::ConvertTo(d, lower));
  }
  if constexpr (Codec::kVectors == 2) {
    for (int v = 0; v < 4; v += 2) {
      const FloatVec even = of_channels[v];
      const FloatVec odd = of_channels[v + 1];
      of_channels[v] = hn::InterleaveLower(d, even, odd);
      of_channels[v + 1] = hn::InterleaveUpper(d, even, odd);
    }
  }
  transpose_blocks(of_channels);
  for (int b = 0; b < (kTwoKeys ? 2 : 4); ++b) {
    float* to = sums + (Codec::kVectors * b + kHalf) * 16;
    hn::Store(hn::MulAdd(of_channels[b], hn::Set(d, 1.0f / kWeightSteps), hn::Load(d, to)), d, to);
  }
}

// sums[r][c] += sum over keys in [begin, end), multiples of 8, of weights[r][k] * value k [c], for kRows rows in pieces
// and the channels in 64 bytes (kTwoKeys: 32) of rows from `offset` on.
template <class Codec, int kRows, bool kTwoKeys, int kHalf>
HWY_NOINLINE void value_integers(const float* weights, const std::uint8_t* const* values, std::int64_t begin,
                                 std::int64_t end, std::int64_t offset, std::int64_t stride, LineStream& ahead,
                                 float* sums) {
  constexpr std::int64_t kKeys = kTwoKeys ? 8 : 4;
  IntVec sum[kRows][kPieces][4];
  for (auto& of_row : sum) {
    for (auto& of_piece : of_row) {
      for (IntVec& s : of_piece) s = hn::Zero(IntTag());
    }
  }
  LineStream lines = ahead;
  for (std::int64_t k = begin; k < end; k += kKeys) {
    if constexpr (kHalf == 0) lines.fetch<4>();
    ByteVec operands[4];
    load_operands<Codec, kTwoKeys, kHalf>(values + k, offset, operands);
    for (int r = 0; r < kRows; ++r) {
      const auto* group = reinterpret_cast<const std::uint8_t*>(weights + r * kTileKeys + k);
      for (int p = 0; p < kPieces; ++p) {
        const ByteVec weight = same_weights<kTwoKeys>(group + p * kPieceBytes);
        for (int v = 0; v < 4; ++v) sum[r][p][v] = add_products(sum[r][p][v], weight, operands[v]);
      }
    }
  }
  ahead = lines;
  const std::int64_t channel = Codec::kVectors * offset;
  for (int r = 0; r < kRows; ++r) {
    add_values<Codec, kTwoKeys, kHalf>(sum[r], sums + r * stride + channel);
  }
}

template <class Codec, int kRows, bool kTwoKeys>
HWY_INLINE void value_integers_halves(const float* weights, const std::uint8_t* const* values, std::int64_t begin,
                                      std::int64_t end, std::int64_t offset, std::int64_t stride, LineStream& ahead,
                                      float* sums) {
  value_integers<Codec, kRows, kTwoKeys, 0>(weights, values, begin, end, offset, stride, ahead, sums);
  if constexpr (Codec::kVectors == 2) {
    value_integers<Codec, kRows, kTwoKeys, 1>(weights, values, begin, end, offset, stride, ahead, sums);
  }
}

template <class Codec, int kRows>
HWY_INLINE void value_integers_rows(const float* weights, const std::uint8_t* const* values, std::int64_t begin,
                                    std::int64_t end, std::int64_t row_bytes, std::int64_t stride, LineStream& ahead,
                                    float* sums) {
  std::int64_t offset = 0;
  for (; offset + 64 <= row_bytes; offset += 64) {
    value_integers_halves<Codec, kRows, false>(weights, values, begin, end, offset, stride, ahead, sums);
  }
  if (offset < row_bytes) {
    value_integers_halves<Codec, kRows, true>(weights, values, begin, end, offset, stride, ahead, sums);
  }
}

// As accumulate_stream. Keys beside [begin, end) have a weight of 0.
template <class Codec>
void accumulate_stream_integers(float* weights, std::int64_t rows, const std::uint8_t* const* values,
                                std::int64_t begin, std::int64_t end, std::int64_t width, std::int64_t stride,
                                LineStream& ahead, float* sums) {
  constexpr std::int64_t kRowPair = 2;
  const std::int64_t row_bytes = Codec::bytes(width);
  begin = begin / 8 * 8;
  end = (end + 7) / 8 * 8;
  for (std::int64_t r = 0; r < rows; ++r) split_weights(padded(end), weights + r * kTileKeys);
  std::int64_t r = 0;
  for (; r + kRowPair <= rows; r += kRowPair) {
    value_integers_rows<Codec, kRowPair>(weights + r * kTileKeys, values, begin, end, row_bytes, stride, ahead,
                                         sums + r * stride);
  }
  if (r < rows) {
    value_integers_rows<Codec, 1>(weights + r * kTileKeys, values, begin, end, row_bytes, stride, ahead,
                                  sums + r * stride);
  }
}

// Splits the rows of Q that K's codes of type Codec will meet.
template <class Codec>
void split_rows(std::int64_t rows, std::int64_t width, float* query, QuerySplit* splits) {
  for (std::int64_t r = 0; r < rows; ++r) splits[r] = split_query<Codec>(width, query + r * width);
}

template <class Codec, class FloatCodec>
constexpr StreamKernels integer_kernels_of() {
  StreamKernels kernels = stream_kernels_of<FloatCodec>();
  kernels.split = split_rows<Codec>;
  kernels.score = score_stream_integers<Codec, FloatCodec>;
  kernels.accumulate = accumulate_stream_integers<Codec>;
  kernels.in_integers = true;
  return kernels;
}

}  // namespace octavo::cpu::HWY_NAMESPACE
HWY_POP_ATTRIBUTES
static_assert(true, "the macro needs a semicolon on some compilers");

HWY_BEFORE_NAMESPACE();
namespace octavo::cpu::HWY_NAMESPACE {

// Where rows fill whole vectors of the kernels above; elsewhere floats, whatever the number of rows.
struct IntegerProducts {
  static StreamKernels of_keys(CacheType type, std::int64_t width) {
    const bool whole = width % 32 == 0;
    if (type == CacheType::kInt8 && whole) return integer_kernels_of<Int8Integers, Int8Codec>();
    if (type == CacheType::kInt4 && whole) return integer_kernels_of<Int4Integers, Int4Codec>();
    return stream_kernels(type);
  }
  static StreamKernels of_values(CacheType type, std::int64_t width) {
    if (type == CacheType::kInt8 && width % 32 == 0) return integer_kernels_of<Int8Integers, Int8Codec>();
    if (type == CacheType::kInt4 && width % 64 == 0) return integer_kernels_of<Int4Integers, Int4Codec>();
    return stream_kernels(type);
  }
};

}  // namespace octavo::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET == HWY_AVX3
