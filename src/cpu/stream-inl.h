// The arithmetic of a tile of few rows, straight from the rows of the cache: few rows share what is decoded, so codes
// become floats in registers, and nothing is transposed or written down. Sums are made in the order of tile-inl.h, so a
// row's bits do not depend on which of the two it meets. Included once per target by kernels.cc.

HWY_BEFORE_NAMESPACE();
namespace octavo::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

inline constexpr std::size_t kLineBytes = 64;

// Fetches cache rows into the L2 cache, line by line in the order of memory: token by token, all heads of a token. Rows
// of one head alone are short and far apart, and memory gives them at half the rate or less.
class LineStream {
 public:
  LineStream() = default;  // nothing to fetch

  // rows: of the tokens whose bit in `tokens` is set; `heads` rows of row_bytes each, head_bytes apart.
  LineStream(const std::uint8_t* const* rows, std::uint64_t tokens, std::int64_t heads, std::int64_t head_bytes,
             std::int64_t row_bytes)
      : rows_(rows), tokens_(tokens), heads_(heads), head_bytes_(head_bytes), row_bytes_(row_bytes) {
    if (head_bytes == row_bytes) {
      row_bytes_ *= heads_;
      heads_ = 1;
    }
  }

  template <std::size_t kLines>
  HWY_INLINE void fetch() {
    if (line_ >= end_ && !next_row()) return;
    for (std::size_t i = 0; i < kLines; ++i) __builtin_prefetch(line_ + i * kLineBytes, 0, 2);
    line_ += kLines * kLineBytes;
  }

  void fetch_rest() {
    while (line_ < end_ || next_row()) fetch<1>();
  }

 private:
  bool next_row() {
    if (tokens_ == 0) return false;
    const std::uint8_t* row = rows_[std::countr_zero(tokens_)] + head_ * head_bytes_;
    // Where the row before ends here, the line that they share has been fetched.
    if (row != end_ || line_ >= row + row_bytes_) line_ = row - reinterpret_cast<std::uintptr_t>(row) % kLineBytes;
    end_ = row + row_bytes_;
    if (++head_ == heads_) {
      head_ = 0;
      tokens_ &= tokens_ - 1;
    }
    return true;
  }

  const std::uint8_t* const* rows_ = nullptr;
  std::uint64_t tokens_ = 0;
  std::int64_t heads_ = 0, head_bytes_ = 0, row_bytes_ = 0;
  std::int64_t head_ = 0;
  const std::uint8_t* line_ = nullptr;
  const std::uint8_t* end_ = nullptr;
};

// scores[r][k] = q[r] . key k for kRows rows and `count` keys, a multiple of four.
template <class Codec, int kRows>
HWY_NOINLINE void score_keys(const float* query, std::int64_t width, const std::uint8_t* const* keys,
                             std::int64_t count, LineStream& ahead, float* scores) {
  const FloatTag d;
  constexpr std::size_t kBytes = Codec::bytes(kChains);
  LineStream lines = ahead;
  for (std::int64_t k = 0; k < count; k += 4) {
    FloatVec sum[kRows][4];
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < 4; ++i) sum[r][i] = hn::Zero(d);
    }
    const std::uint8_t *key0 = keys[k], *key1 = keys[k + 1], *key2 = keys[k + 2], *key3 = keys[k + 3];
    for (std::int64_t c = 0; c < width; c += kChains) {
      lines.fetch<(4 * kBytes + kLineBytes - 1) / kLineBytes>();
      const FloatVec key[4] = {Codec::load(d, key0), Codec::load(d, key1), Codec::load(d, key2), Codec::load(d, key3)};
      key0 += kBytes;
      key1 += kBytes;
      key2 += kBytes;
      key3 += kBytes;
      for (int r = 0; r < kRows; ++r) {
        const FloatVec q = hn::Load(d, query + r * width + c);
        for (int i = 0; i < 4; ++i) sum[r][i] = hn::MulAdd(q, key[i], sum[r][i]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      hn::Store(sum_lanes(sum[r][0], sum[r][1], sum[r][2], sum[r][3]), ScoreTag(), scores + r * kTileKeys + k);
    }
  }
  ahead = lines;
}

// sums[r][c] += sum over keys k in [begin, end) of weights[r][k] * value k [c], for kRows rows and kVectors vectors of
// channels from `column` on.
template <class Codec, int kRows, int kVectors>
HWY_NOINLINE void value_keys(const float* weights, const std::uint8_t* const* values, std::int64_t begin,
                             std::int64_t end, std::int64_t column, std::int64_t stride, LineStream& ahead,
                             float* sums) {
  const FloatTag d;
  const std::size_t offset = Codec::bytes(static_cast<std::size_t>(column));
  sums += column;
  FloatVec sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = hn::Load(d, sums + r * stride + v * kChains);
    }
  }
  LineStream lines = ahead;
  for (std::int64_t k = begin; k < end; ++k) {
    lines.fetch<(Codec::bytes(kVectors * kChains) + kLineBytes - 1) / kLineBytes>();
    const std::uint8_t* from = values[k] + offset;
    FloatVec value[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      value[v] = Codec::load(d, from + Codec::bytes(static_cast<std::size_t>(v) * kChains));
    }
    for (int r = 0; r < kRows; ++r) {
      const FloatVec w = hn::Set(d, weights[r * kTileKeys + k]);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(w, value[v], sum[r][v]);
    }
  }
  ahead = lines;
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      hn::Store(sum[r][v], d, sums + r * stride + v * kChains);
    }
  }
}

template <class Codec, int kRows>
HWY_INLINE void value_keys_rows(const float* weights, const std::uint8_t* const* values, std::int64_t begin,
                                std::int64_t end, std::int64_t stride, LineStream& ahead, float* sums) {
  constexpr std::int64_t kStep = kBlockVectors * kChains;
  std::int64_t column = 0;
  for (; column + kStep <= stride; column += kStep) {
    value_keys<Codec, kRows, kBlockVectors>(weights, values, begin, end, column, stride, ahead, sums);
  }
  for (; column < stride; column += kChains) {
    value_keys<Codec, kRows, 1>(weights, values, begin, end, column, stride, ahead, sums);
  }
}

// scores[r][k] = q[r] . key k for `count` keys and the rows of one KV head.
template <class Codec>
void score_stream(const QueryRows& rows_of_q, std::int64_t rows, std::int64_t width, const std::uint8_t* const* keys,
                  std::int64_t count, LineStream& ahead, float* scores) {
  const float* query = rows_of_q.floats;
  for (std::int64_t r = 0; r < rows; r += kScoreRows, query += kScoreRows * width, scores += kScoreRows * kTileKeys) {
    switch (std::min<std::int64_t>(rows - r, kScoreRows)) {
      case 1: score_keys<Codec, 1>(query, width, keys, count, ahead, scores); break;
      case 2: score_keys<Codec, 2>(query, width, keys, count, ahead, scores); break;
      case 3: score_keys<Codec, std::min(3, kScoreRows)>(query, width, keys, count, ahead, scores); break;
      default: score_keys<Codec, kScoreRows>(query, width, keys, count, ahead, scores); break;
    }
  }
}

// sums[r] += weights[r][k] * value k over keys [begin, end); stride = width of the rows of sums.
template <class Codec>
void accumulate_stream(float* weights, std::int64_t rows, const std::uint8_t* const* values, std::int64_t begin,
                       std::int64_t end, std::int64_t, std::int64_t stride, LineStream& ahead, float* sums) {
  for (std::int64_t r = 0; r < rows; r += kBlockRows, weights += kBlockRows * kTileKeys, sums += kBlockRows * stride) {
    switch (std::min<std::int64_t>(rows - r, kBlockRows)) {
      case 1: value_keys_rows<Codec, 1>(weights, values, begin, end, stride, ahead, sums); break;
      case 2: value_keys_rows<Codec, 2>(weights, values, begin, end, stride, ahead, sums); break;
      case 3: value_keys_rows<Codec, 3>(weights, values, begin, end, stride, ahead, sums); break;
      default: value_keys_rows<Codec, 4>(weights, values, begin, end, stride, ahead, sums); break;
    }
  }
}

struct StreamKernels {
  // Makes of floats what `score` multiplies. nullptr: nothing.
  void (*split)(const QueryRows& query, std::int64_t rows, std::int64_t width);
  void (*score)(const QueryRows& query, std::int64_t rows, std::int64_t width, const std::uint8_t* const* keys,
                std::int64_t count, LineStream& ahead, float* scores);
  // width: channels of a value that are wanted. Of the weights nothing is left.
  void (*accumulate)(float* weights, std::int64_t rows, const std::uint8_t* const* values, std::int64_t begin,
                     std::int64_t end, std::int64_t width, std::int64_t stride, LineStream& ahead, float* sums);
  std::int64_t (*row_bytes)(std::int64_t channels);
  bool in_integers;  // other bits than floats have: tiles of many rows must use these kernels too
};

template <class Codec>
HWY_INLINE constexpr StreamKernels stream_kernels_of() {
  const auto row_bytes = [](std::int64_t channels) {
    return static_cast<std::int64_t>(Codec::bytes(static_cast<std::size_t>(channels)));
  };
  return {nullptr, score_stream<Codec>, accumulate_stream<Codec>, row_bytes, false};
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

// Which kernels multiply Q by K and weights by V: those that every processor of the target has.
struct FloatProducts {
  static StreamKernels of(CacheType type, std::int64_t) { return stream_kernels(type); }
};

}  // namespace octavo::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
