// int8 and int4 caches without a float in the loops: Q and the weights of V become fixed point of 24 bits in three
// 8-bit pieces, and VNNI multiplies codes by pieces, 64 products an instruction, into 32-bit sums that are exact. Sums
// without rounding have no order, so tiles of any number of rows use these kernels and a row has the same bits in all
// of them. Why 24 bits and what they cost in accuracy: docs/decisions/0011-integer-products-on-vnni.md.
//
// Included once per target by kernels.cc; empty but for AVX-512, where kernels.cc makes a second table with these.
#if HWY_TARGET == HWY_AVX3

// Highway's AVX-512 target has no VNNI; in these functions alone the compiler may use it.
HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512vnni,avx512vbmi")
static_assert(true, "the macro needs a semicolon on some compilers");
namespace octavo::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using IntTag = hn::Rebind<std::int32_t, FloatTag>;
using IntVec = hn::Vec<IntTag>;

inline constexpr int kPieces = 3;  // lowest first

// Four bytes of each piece, then four unused ones: the numbers of four channels (of Q) or four keys (of weights), in as
// many bytes as four floats have.
inline constexpr std::int64_t kPieceBytes = 4;
inline constexpr std::int64_t kGroupBytes = 16;
inline constexpr std::int64_t kRowStep = 32;  // a cache row is a multiple of so many bytes

// 127 * 65536 + 127 * 256: the highest piece is at most 127, and 127 units are left for the roundings of steps.
inline constexpr float kQuerySteps = 8355584.0f;
inline constexpr float kWeightSteps = 16777215.0f;
// Rows of Q with nothing above this stay floats: the inverse of their unit would overflow.
inline constexpr float kSmallestSplit = 0x1.0p-100f;

// sums += the products of unsigned and signed bytes, four in each lane. By name, because gcc 12 copies the sums around
// its intrinsic and spills them in the loop of values: int8 decode takes 1.38 times as long with that.
HWY_INLINE void add_products(IntVec& sums, ByteVec unsigned_bytes, ByteVec signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums.raw) : "v"(unsigned_bytes.raw), "v"(signed_bytes.raw));
}

// ... and the same four signed bytes in every lane.
HWY_INLINE void add_products(IntVec& sums, ByteVec unsigned_bytes, const std::int32_t& signed_bytes) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums.raw) : "v"(unsigned_bytes.raw), "m"(signed_bytes));
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

// What stored bytes become as operands. kOffset: what an unsigned code has above the signed one.
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

// Row `row` of `rows` rows of Q to pieces, q = unit * (lowest + 256 * middle + 65536 * highest), each from -128 to 127:
// 16 bytes for every four channels and row, rows of the same channels together. A row with a number that is not finite,
// or with none large enough to be divided by, becomes zeros and stays marked as not split.
template <class Codec>
HWY_INLINE QuerySplit split_query(const float* query, std::int64_t width, std::int64_t row, std::int64_t rows,
                                  std::int32_t* pieces) {
  const FloatTag d;
  const IntTag di;
  FloatVec largest = hn::Zero(d);
  for (std::int64_t c = 0; c < width; c += kChains) largest = hn::Max(largest, hn::Abs(hn::Load(d, query + c)));
  const float magnitude = hn::GetLane(hn::MaxOfLanes(d, largest));
  QuerySplit split;
  const bool splits = !has_non_finite(query, width) && (magnitude == 0.0f || magnitude >= kSmallestSplit);
  if (splits) split.unit = magnitude / kQuerySteps;
  const FloatVec steps = hn::Set(d, splits && magnitude != 0.0f ? kQuerySteps / magnitude : 0.0f);
  IntVec sums = hn::Zero(di);
  const ByteVec ones = hn::Set(ByteTag(), std::uint8_t{1});
  const IntVec bias = hn::Set(di, 0x808080);  // with it, each byte is a piece + 128
  for (std::int64_t c = 0; c < width; c += kChains) {
    const FloatVec q = splits ? Codec::in_order(hn::Load(d, query + c)) : hn::Zero(d);
    const ByteVec of_channels = transpose_pieces(hn::Xor(hn::Add(hn::NearestInt(hn::Mul(q, steps)), bias), bias));
    add_products(sums, ones, of_channels);
    alignas(64) std::int32_t groups[kChains];
    hn::Store(hn::BitCast(di, of_channels), di, groups);
    for (std::int64_t i = 0; i < 4; ++i) std::memcpy(pieces + ((c / 4 + i) * rows + row) * 4, groups + 4 * i, 16);
  }
  alignas(64) std::int32_t lanes[kChains];
  hn::Store(sums, di, lanes);
  for (int p = 0; p < kPieces; ++p) {
    for (std::int64_t i = p; i < kChains; i += 4) split.sum[p] -= lanes[i];
    split.sum[p] *= Codec::kOffset;
  }
  return split;
}

// 32 bytes of each of 16 keys, as four bytes of all keys in each of eight vectors.
HWY_INLINE void load_keys(const std::uint8_t* const* keys, std::int64_t offset, ByteVec (&of_keys)[8]) {
  const IntTag di;
  const hn::Repartition<std::uint64_t, IntTag> d64;
  IntVec part[2][4];
  for (int half = 0; half < 2; ++half) {
    IntVec rows[4];  // 32 bytes of a key, 32 of the key four after it
    for (int i = 0; i < 4; ++i) {
      rows[i] = IntVec{hn::BitCast(di, load_pair(keys[8 * half + i] + offset, keys[8 * half + i + 4] + offset)).raw};
    }
    const auto low01 = hn::BitCast(d64, hn::InterleaveLower(di, rows[0], rows[1]));
    const auto high01 = hn::BitCast(d64, hn::InterleaveUpper(di, rows[0], rows[1]));
    const auto low23 = hn::BitCast(d64, hn::InterleaveLower(di, rows[2], rows[3]));
    const auto high23 = hn::BitCast(d64, hn::InterleaveUpper(di, rows[2], rows[3]));
    part[half][0] = hn::BitCast(di, hn::InterleaveLower(d64, low01, low23));
    part[half][1] = hn::BitCast(di, hn::InterleaveUpper(d64, low01, low23));
    part[half][2] = hn::BitCast(di, hn::InterleaveLower(d64, high01, high23));
    part[half][3] = hn::BitCast(di, hn::InterleaveUpper(d64, high01, high23));
  }
  for (int i = 0; i < 4; ++i) {
    of_keys[i] = ByteVec{_mm512_shuffle_i32x4(part[0][i].raw, part[1][i].raw, 0x88)};
    of_keys[i + 4] = ByteVec{_mm512_shuffle_i32x4(part[0][i].raw, part[1][i].raw, 0xDD)};
  }
}

// The products of four stored bytes of 16 keys and all rows' pieces of their channels, which it moves on.
template <class Codec, int kRows>
HWY_INLINE void add_channels(ByteVec stored, const std::int32_t*& pieces, IntVec (&sum)[kRows][kPieces]) {
  ByteVec codes[Codec::kVectors];
  Codec::unsigned_codes(stored, codes);
  for (int v = 0; v < Codec::kVectors; ++v) {
    for (int r = 0; r < kRows; ++r) {
      for (int p = 0; p < kPieces; ++p) add_products(sum[r][p], codes[v], pieces[4 * r + p]);
    }
    pieces += 4 * kRows;
  }
}

// scores[r][k] = q[r] . key k for kRows rows in pieces and `count` keys, a multiple of 16.
template <class Codec, int kRows>
HWY_NOINLINE void score_integers(const std::int32_t* pieces, const QuerySplit* splits, std::int64_t width,
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
    const std::int32_t* of_channels = pieces;
    for (std::int64_t offset = 0; offset < row_bytes; offset += kRowStep) {
      lines.fetch<4>();
      lines.fetch<4>();
      ByteVec stored[8];
      load_keys(keys + k, offset, stored);
      // One by one: gcc 12 does not unroll a loop of this length, and keeps `stored` in memory.
      add_channels<Codec>(stored[0], of_channels, sum);
      add_channels<Codec>(stored[1], of_channels, sum);
      add_channels<Codec>(stored[2], of_channels, sum);
      add_channels<Codec>(stored[3], of_channels, sum);
      add_channels<Codec>(stored[4], of_channels, sum);
      add_channels<Codec>(stored[5], of_channels, sum);
      add_channels<Codec>(stored[6], of_channels, sum);
      add_channels<Codec>(stored[7], of_channels, sum);
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
void score_stream_integers(const QueryRows& query, std::int64_t rows, std::int64_t width,
                           const std::uint8_t* const* keys, std::int64_t count, LineStream& ahead, float* scores) {
  const QuerySplit* splits = query.splits;
  for (std::int64_t r = 0; r < rows; r += kScoreRows) {
    const std::int32_t* q = query.pieces + r * width;
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
    score_keys<FloatCodec, 1>(query.floats + r * width, width, keys, count, ahead, scores + r * kTileKeys);
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
    return load_pair(values[0] + offset, values[4] + offset);
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
// and the channels in bytes [first, last) of rows, 64 (kTwoKeys: 32) at a time.
template <class Codec, int kRows, bool kTwoKeys, int kHalf>
HWY_NOINLINE void value_integers(const float* weights, const std::uint8_t* const* values, std::int64_t begin,
                                 std::int64_t end, std::int64_t first, std::int64_t last, std::int64_t stride,
                                 LineStream& ahead, float* sums) {
  constexpr std::int64_t kKeys = kTwoKeys ? 8 : 4;
  // A step takes four lines, and groups of three or four query rows are two passes over them.
  constexpr std::size_t kLines = 4 / kRows / Codec::kVectors;
  LineStream lines = ahead;
  for (std::int64_t offset = first; offset < last; offset += kTwoKeys ? 32 : 64) {
    IntVec sum[kRows][kPieces][4];
    for (int r = 0; r < kRows; ++r) {
      for (int p = 0; p < kPieces; ++p) {
        for (int v = 0; v < 4; ++v) sum[r][p][v] = hn::Zero(IntTag());
      }
    }
    for (std::int64_t k = begin; k < end; k += kKeys) {
      lines.fetch<kLines>();
      ByteVec operands[4];
      load_operands<Codec, kTwoKeys, kHalf>(values + k, offset, operands);
      for (int r = 0; r < kRows; ++r) {
        const auto* group = reinterpret_cast<const std::uint8_t*>(weights + r * kTileKeys + k);
        for (int p = 0; p < kPieces; ++p) {
          const ByteVec weight = same_weights<kTwoKeys>(group + p * kPieceBytes);
          for (int v = 0; v < 4; ++v) add_products(sum[r][p][v], weight, operands[v]);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      add_values<Codec, kTwoKeys, kHalf>(sum[r], sums + r * stride + Codec::kVectors * offset);
    }
  }
  ahead = lines;
}

template <class Codec, int kRows, bool kTwoKeys>
HWY_INLINE void value_integers_halves(const float* weights, const std::uint8_t* const* values, std::int64_t begin,
                                      std::int64_t end, std::int64_t first, std::int64_t last, std::int64_t stride,
                                      LineStream& ahead, float* sums) {
  value_integers<Codec, kRows, kTwoKeys, 0>(weights, values, begin, end, first, last, stride, ahead, sums);
  if constexpr (Codec::kVectors == 2) {
    value_integers<Codec, kRows, kTwoKeys, 1>(weights, values, begin, end, first, last, stride, ahead, sums);
  }
}

template <class Codec, int kRows>
HWY_INLINE void value_integers_rows(const float* weights, const std::uint8_t* const* values, std::int64_t begin,
                                    std::int64_t end, std::int64_t row_bytes, std::int64_t stride, LineStream& ahead,
                                    float* sums) {
  const std::int64_t whole = row_bytes / 64 * 64;
  if (whole != 0) {
    value_integers_halves<Codec, kRows, false>(weights, values, begin, end, 0, whole, stride, ahead, sums);
  }
  if (whole != row_bytes) {
    value_integers_halves<Codec, kRows, true>(weights, values, begin, end, whole, row_bytes, stride, ahead, sums);
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

// Splits rows of Q for K's codes of type Codec.
static_assert(kBlockRows % kScoreRows == 0, "rows_that_see() starts at whole blocks, which these must fill");
template <class Codec>
void split_rows(const QueryRows& query, std::int64_t rows, std::int64_t width) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t block = r / kScoreRows * kScoreRows;
    query.splits[r] =
        split_query<Codec>(query.floats + r * width, width, r - block, std::min<std::int64_t>(rows - block, kScoreRows),
                           query.pieces + block * width);
  }
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

// What a processor with VNNI and VBMI has over FloatProducts. Rows of codes that are no whole pieces of 32 bytes are
// multiplied as floats, whatever the number of query rows.
struct VnniProducts {
  static StreamKernels of(CacheType type, std::int64_t width) {
    if (type == CacheType::kInt8 && Int8Integers::bytes(width) % kRowStep == 0) {
      return integer_kernels_of<Int8Integers, Int8Codec>();
    }
    if (type == CacheType::kInt4 && Int4Integers::bytes(width) % kRowStep == 0) {
      return integer_kernels_of<Int4Integers, Int4Codec>();
    }
    StreamKernels kernels = stream_kernels(type);
    if (type == CacheType::kFloat8E4M3FN) {
      kernels.score = score_stream_float8;
      kernels.accumulate = accumulate_stream_float8;
    }
    return kernels;
  }
};

}  // namespace octavo::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET == HWY_AVX3
