// The arithmetic of a tile of few rows, straight from the rows of the cache: few rows share what is decoded, so codes
// become floats in registers, and nothing is written down. Every sum is the accumulator of tile-inl.h, walked in the
// same order, so a row's bits do not depend on which of the two it meets. Included once per target by kernels.cc.

HWY_BEFORE_NAMESPACE();
namespace octavo::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

inline constexpr std::size_t kLineBytes = 64;
inline constexpr std::size_t kPieceBytes = 16;  // of a key that are transposed at a time

// Fetches cache rows into the L2 cache, line by line in the order of memory: token by token, all heads of a token. Rows
// of one head alone are short and far apart, and memory gives them at half the rate or less.
class LineStream {
 public:
  // rows: of the tokens whose bit in `tokens` is set; `heads` rows of row_bytes each, head_bytes apart.
  LineStream(const std::uint8_t* const* rows, std::uint64_t tokens, std::int64_t heads, std::int64_t head_bytes,
             std::int64_t row_bytes)
      : rows_(rows), tokens_(tokens), heads_(heads), head_bytes_(head_bytes), row_bytes_(row_bytes) {
    if (head_bytes == row_bytes) {
      row_bytes_ *= heads_;
      heads_ = 1;
    }
  }

  HWY_INLINE void fetch() {
    if (line_ >= end_ && !next_row()) return;
    __builtin_prefetch(line_, 0, 2);
    line_ += kLineBytes;
  }

  void fetch_rest() {
    while (line_ < end_ || tokens_ != 0) fetch();
  }

 private:
  bool next_row() {
    if (tokens_ == 0) return false;
    const std::uint8_t* row = rows_[std::countr_zero(tokens_)] + head_ * head_bytes_;
    line_ = row - reinterpret_cast<std::uintptr_t>(row) % kLineBytes;
    end_ = row + row_bytes_;
    if (++head_ == heads_) {
      head_ = 0;
      tokens_ &= tokens_ - 1;
    }
    return true;
  }

  const std::uint8_t* const* rows_;
  std::uint64_t tokens_;
  std::int64_t heads_, head_bytes_, row_bytes_;
  std::int64_t head_ = 0;
  const std::uint8_t* line_ = nullptr;
  const std::uint8_t* end_ = nullptr;
};

using ByteTag = hn::Repartition<std::uint8_t, FloatTag>;
using ByteVec = hn::Vec<ByteTag>;
inline constexpr std::size_t kFloatLanes = hn::MaxLanes(FloatTag());
inline constexpr std::size_t kBlocks = kFloatLanes / 4;  // 128-bit blocks of a vector

// Copies `bytes` of each of `count` rows to buffers of kLineBytes each. (With a power of two of bytes to a token, all
// rows of a head share a few of the L1 cache's sets: a line there may be gone before its second piece is read.)
HWY_INLINE void copy_lines(const std::uint8_t* const* rows, std::int64_t count, std::size_t offset, std::size_t bytes,
                           LineStream& ahead, std::uint8_t* to) {
  const ByteTag d;
  const hn::CappedTag<std::uint8_t, kPieceBytes> piece;
  for (std::int64_t k = 0; k < count; ++k, to += kLineBytes) {
    ahead.fetch();
    const std::uint8_t* from = rows[k] + offset;
    if (bytes == kLineBytes) {
      for (std::size_t b = 0; b < kLineBytes; b += hn::Lanes(d)) hn::Store(hn::LoadU(d, from + b), d, to + b);
    } else {
      for (std::size_t b = 0; b < bytes; b += kPieceBytes) hn::Store(hn::LoadU(piece, from + b), piece, to + b);
    }
  }
}

// Block b of the result: 16 bytes of key 4 * b; keys are kLineBytes apart.
HWY_INLINE ByteVec load_pieces(const std::uint8_t* key) {
  const ByteTag d;
  if constexpr (kBlocks == 1) {
    return hn::Load(d, key);
  } else {
    constexpr std::size_t kStride = 4 * kLineBytes;
    const hn::Half<ByteTag> half;
    if constexpr (kBlocks == 2) {
      return hn::Combine(d, hn::Load(half, key + kStride), hn::Load(half, key));
    } else {
      const hn::Half<decltype(half)> quarter;
      const auto low = hn::Combine(half, hn::Load(quarter, key + kStride), hn::Load(quarter, key));
      const auto high = hn::Combine(half, hn::Load(quarter, key + 3 * kStride), hn::Load(quarter, key + 2 * kStride));
      return hn::Combine(d, high, low);
    }
  }
}

// Moves 32-bit word w of block b to b + w * kBlocks (kWords = 1), or pairs of words likewise (kWords = 2).
template <std::size_t kWords>
HWY_INLINE ByteVec gather_blocks(ByteVec v) {
  if constexpr (kBlocks == 1) {
    return v;
  } else {
    const hn::Repartition<std::uint32_t, ByteTag> d;
    alignas(64) static constexpr auto kFrom = [] {
      std::array<std::int32_t, kFloatLanes> from{};
      for (std::size_t i = 0; i < kFloatLanes; ++i) {
        const std::size_t unit = i / kWords;
        from[i] = static_cast<std::int32_t>((unit % kBlocks) * 4 + unit / kBlocks * kWords + i % kWords);
      }
      return from;
    }();
    return hn::BitCast(ByteTag(), hn::TableLookupLanes(hn::BitCast(d, v), hn::SetTableIndices(d, kFrom.data())));
  }
}

// Transposes 16-byte pieces of kFloatLanes keys in units of kUnit bytes: unit u of all keys, in their order, follows
// unit u - 1 in the four vectors.
template <std::size_t kUnit>
HWY_INLINE void transpose_pieces(const std::uint8_t* keys, ByteVec (&to)[4]) {
  static_assert(kUnit == 1 || kUnit == 2 || kUnit == 4);
  const ByteTag d;
  const ByteVec v0 = load_pieces(keys);
  const ByteVec v1 = load_pieces(keys + kLineBytes);
  const ByteVec v2 = load_pieces(keys + 2 * kLineBytes);
  const ByteVec v3 = load_pieces(keys + 3 * kLineBytes);
  const hn::Repartition<hwy::UnsignedFromSize<kUnit>, ByteTag> d1;
  const hn::Repartition<hwy::UnsignedFromSize<2 * kUnit>, ByteTag> d2;
  const auto low01 = hn::BitCast(d2, hn::InterleaveLower(d1, hn::BitCast(d1, v0), hn::BitCast(d1, v1)));
  const auto low23 = hn::BitCast(d2, hn::InterleaveLower(d1, hn::BitCast(d1, v2), hn::BitCast(d1, v3)));
  const auto high01 = hn::BitCast(d2, hn::InterleaveUpper(d1, hn::BitCast(d1, v0), hn::BitCast(d1, v1)));
  const auto high23 = hn::BitCast(d2, hn::InterleaveUpper(d1, hn::BitCast(d1, v2), hn::BitCast(d1, v3)));
  to[0] = hn::BitCast(d, hn::InterleaveLower(d2, low01, low23));
  to[1] = hn::BitCast(d, hn::InterleaveUpper(d2, low01, low23));
  to[2] = hn::BitCast(d, hn::InterleaveLower(d2, high01, high23));
  to[3] = hn::BitCast(d, hn::InterleaveUpper(d2, high01, high23));
  if constexpr (kUnit < 4) {
    for (ByteVec& v : to) v = gather_blocks<kUnit>(v);
  }
}

inline constexpr int kKeyVectors = 2;  // of scores at a time: with four rows eight sums, twice the latency of a sum
static_assert(kStreamKeys % (kKeyVectors * kFloatLanes) == 0);
inline constexpr std::int64_t kDirectKeys = kKeyVectors * static_cast<std::int64_t>(kFloatLanes);

// scores[r][k] = q[r] . key k for kDirectKeys keys.
template <class Codec, int kRows>
HWY_NOINLINE void score_direct(const float* query, std::int64_t width, const std::uint8_t* const* keys,
                               LineStream& ahead, float* scores) {
  const FloatTag d;
  constexpr std::size_t kUnits = kPieceBytes / Codec::kUnit;  // of a piece
  constexpr std::size_t kUnitBytes = kFloatLanes * Codec::kUnit;
  alignas(64) std::uint8_t lines[kDirectKeys * kLineBytes];
  alignas(64) std::uint8_t units[kKeyVectors][kUnits * kUnitBytes];
  FloatVec sum[kRows][kKeyVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kKeyVectors; ++v) sum[r][v] = hn::Zero(d);
  }
  const std::size_t bytes = Codec::bytes(static_cast<std::size_t>(width));
  for (std::size_t offset = 0; offset < bytes; offset += kPieceBytes) {
    const std::size_t in_line = offset % kLineBytes;
    if (in_line == 0) copy_lines(keys, kDirectKeys, offset, std::min(bytes - offset, kLineBytes), ahead, lines);
    for (int v = 0; v < kKeyVectors; ++v) {
      ByteVec piece[4];
      transpose_pieces<Codec::kUnit>(lines + static_cast<std::size_t>(v) * kFloatLanes * kLineBytes + in_line, piece);
      for (std::size_t i = 0; i < 4; ++i) hn::Store(piece[i], ByteTag(), units[v] + i * hn::Lanes(ByteTag()));
    }
    for (std::size_t u = 0; u < kUnits; ++u) {
      FloatVec key[kKeyVectors][Codec::kUnitChannels];
      for (int v = 0; v < kKeyVectors; ++v) Codec::load_units(d, units[v] + u * kUnitBytes, key[v]);
      for (std::size_t c = 0; c < Codec::kUnitChannels; ++c, ++query) {
        for (int r = 0; r < kRows; ++r) {
          const FloatVec q = hn::Set(d, query[r * width]);
          for (int v = 0; v < kKeyVectors; ++v) sum[r][v] = hn::MulAdd(q, key[v][c], sum[r][v]);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kKeyVectors; ++v) {
      hn::Store(sum[r][v], d, scores + r * kTileKeys + v * static_cast<int>(kFloatLanes));
    }
  }
}

// sums[r][c] += sum over keys k in [begin, end) of weights[r][k] * value k [c], for kRows rows and kVectors vectors of
// channels from `column` on.
template <class Codec, int kRows, int kVectors>
HWY_NOINLINE void value_direct(const float* weights, const std::uint8_t* const* values, std::int64_t begin, std::int64_t end,
                               std::int64_t column, std::int64_t stride, LineStream& ahead, float* sums) {
  const FloatTag d;
  const std::size_t offset = Codec::bytes(static_cast<std::size_t>(column));
  FloatVec sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = hn::Load(d, sums + r * stride + column + v * static_cast<int>(kFloatLanes));
    }
  }
  for (std::int64_t k = begin; k < end; ++k) {
    for (std::size_t byte = 0; byte < Codec::bytes(kVectors * kFloatLanes); byte += kLineBytes) ahead.fetch();
    const std::uint8_t* from = values[k] + offset;
    FloatVec value[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      value[v] = Codec::load(d, from + Codec::bytes(static_cast<std::size_t>(v) * kFloatLanes));
    }
    for (int r = 0; r < kRows; ++r) {
      const FloatVec w = hn::Set(d, weights[r * kTileKeys + k]);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(w, value[v], sum[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      hn::Store(sum[r][v], d, sums + r * stride + column + v * static_cast<int>(kFloatLanes));
    }
  }
}

template <class Codec, int kRows>
HWY_INLINE void score_direct_rows(const float* query, std::int64_t width, const std::uint8_t* const* keys,
                                  LineStream& ahead, float* scores) {
  for (std::int64_t k = 0; k < kStreamKeys; k += kDirectKeys) {
    score_direct<Codec, kRows>(query, width, keys + k, ahead, scores + k);
  }
}

template <class Codec, int kRows>
HWY_INLINE void value_direct_rows(const float* weights, const std::uint8_t* const* values, std::int64_t begin,
                                  std::int64_t end, std::int64_t stride, LineStream& ahead, float* sums) {
  constexpr std::int64_t kStep = kBlockVectors * static_cast<std::int64_t>(kFloatLanes);
  std::int64_t column = 0;
  for (; column + kStep <= stride; column += kStep) {
    value_direct<Codec, kRows, kBlockVectors>(weights, values, begin, end, column, stride, ahead, sums);
  }
  for (; column < stride; column += static_cast<std::int64_t>(kFloatLanes)) {
    value_direct<Codec, kRows, 1>(weights, values, begin, end, column, stride, ahead, sums);
  }
}

// scores[r][k] = q[r] . key k for kStreamKeys keys and the rows of one KV head.
template <class Codec>
void score_stream(const float* query, std::int64_t rows, std::int64_t width, const std::uint8_t* const* keys,
                  LineStream& ahead, float* scores) {
  for (std::int64_t r = 0; r < rows; r += kBlockRows, query += kBlockRows * width, scores += kBlockRows * kTileKeys) {
    switch (std::min<std::int64_t>(rows - r, kBlockRows)) {
      case 1: score_direct_rows<Codec, 1>(query, width, keys, ahead, scores); break;
      case 2: score_direct_rows<Codec, 2>(query, width, keys, ahead, scores); break;
      case 3: score_direct_rows<Codec, 3>(query, width, keys, ahead, scores); break;
      default: score_direct_rows<Codec, 4>(query, width, keys, ahead, scores); break;
    }
  }
}

// sums[r] += weights[r][k] * value k over keys [begin, end); stride = width of the rows of sums.
template <class Codec>
void accumulate_stream(const float* weights, std::int64_t rows, const std::uint8_t* const* values, std::int64_t begin,
                       std::int64_t end, std::int64_t stride, LineStream& ahead, float* sums) {
  for (std::int64_t r = 0; r < rows; r += kBlockRows, weights += kBlockRows * kTileKeys, sums += kBlockRows * stride) {
    switch (std::min<std::int64_t>(rows - r, kBlockRows)) {
      case 1: value_direct_rows<Codec, 1>(weights, values, begin, end, stride, ahead, sums); break;
      case 2: value_direct_rows<Codec, 2>(weights, values, begin, end, stride, ahead, sums); break;
      case 3: value_direct_rows<Codec, 3>(weights, values, begin, end, stride, ahead, sums); break;
      default: value_direct_rows<Codec, 4>(weights, values, begin, end, stride, ahead, sums); break;
    }
  }
}

struct StreamKernels {
  void (*score)(const float* query, std::int64_t rows, std::int64_t width, const std::uint8_t* const* keys,
                LineStream& ahead, float* scores);
  void (*accumulate)(const float* weights, std::int64_t rows, const std::uint8_t* const* values, std::int64_t begin,
                     std::int64_t end, std::int64_t stride, LineStream& ahead, float* sums);
  std::int64_t (*row_bytes)(std::int64_t channels);
};

template <class Codec>
HWY_INLINE constexpr StreamKernels stream_kernels_of() {
  return {score_stream<Codec>, accumulate_stream<Codec>, [](std::int64_t channels) {
            return static_cast<std::int64_t>(Codec::bytes(static_cast<std::size_t>(channels)));
          }};
}

HWY_INLINE StreamKernels stream_kernels(CacheType type) {
  switch (type) {
    case CacheType::kFloat16: return stream_kernels_of<Float16Codec>();
    case CacheType::kBFloat16: return stream_kernels_of<BFloat16Codec>();
    case CacheType::kInt8: return stream_kernels_of<Int8Codec>();
    case CacheType::kFloat8E4M3FN: return stream_kernels_of<Float8Codec>();
    case CacheType::kInt4: return stream_kernels_of<Int4Codec>();
    case CacheType::kFloat4E2M1: return stream_kernels_of<Float4Codec>();
    case CacheType::kFloat32:
    case CacheType::kTensorType: break;
  }
  return stream_kernels_of<Float32Codec>();
}

}  // namespace octavo::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
