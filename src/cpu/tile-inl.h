// The arithmetic of one tile: up to 64 keys against the rows of one KV head. Included once per target by kernels.cc.
// Every (row, key) score and every (row, channel) sum is made in a fixed order, so a row's bits do not depend on how
// many rows share the tile.

HWY_BEFORE_NAMESPACE();
namespace octavo::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// A score is the sum of as many chains as a vector has lanes: chain i takes channels i, i + lanes, ... in ascending
// order. sum_lanes() adds the chains of vectors up, score_block() does the same with one chain after the other.
inline constexpr std::int64_t kChains = hn::MaxLanes(FloatTag());
using ScoreTag = hn::Simd<float, 4, 0>;

// The sum of a vector's 128-bit blocks, upper half to lower half.
template <class D>
HWY_INLINE hn::Vec<ScoreTag> sum_blocks(D, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(D()) == 4) {
    return v;
  } else {
    const hn::Half<D> half;
    return sum_blocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

// The sums of the lanes of four vectors: within each block (0 + 2) + (1 + 3), then of the blocks.
HWY_INLINE hn::Vec<ScoreTag> sum_lanes(FloatVec a, FloatVec b, FloatVec c, FloatVec e) {
  const FloatTag d;
  const hn::Repartition<double, FloatTag> pairs;
  const auto ab = hn::BitCast(pairs, hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b)));
  const auto ce = hn::BitCast(pairs, hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e)));
  return sum_blocks(d, hn::Add(hn::BitCast(d, hn::InterleaveLower(pairs, ab, ce)),
                               hn::BitCast(d, hn::InterleaveUpper(pairs, ab, ce))));
}

inline constexpr std::int64_t kEvenFirst[4] = {0, 2, 1, 3};

// Where each chain's channels start when chains follow one another in the order in which score_block() needs them.
struct ChainStarts {
  std::int64_t start[kChains];

  explicit ChainStarts(std::int64_t width) {
    std::int64_t at = 0;
    for (std::int64_t i = 0; i < kChains; ++i) {
      const std::int64_t block = kChains == 16 ? kEvenFirst[i / 4] : i / 4;
      const std::int64_t chain = 4 * block + kEvenFirst[i % 4];
      start[chain] = at;
      at += std::max<std::int64_t>(0, (width - chain + kChains - 1) / kChains);
    }
  }
};

// transposed[i][k] = keys[k][c] for key_count keys (a multiple of 4) and width channels (a multiple of 4), where c is
// the i-th channel in the order of chains, by 4x4 blocks in 128-bit registers: half a shuffle an element, on the two
// ports that 128-bit shuffles have, is no slower than 512-bit ones on one.
HWY_INLINE void transpose_keys(const std::uint8_t* const* keys, std::int64_t key_count, std::int64_t width,
                               float* transposed) {
  const hn::Simd<float, 4, 0> d;
  const ChainStarts starts(width);
  for (std::int64_t k = 0; k < key_count; k += 4) {
    const auto* key0 = reinterpret_cast<const float*>(keys[k]);
    const auto* key1 = reinterpret_cast<const float*>(keys[k + 1]);
    const auto* key2 = reinterpret_cast<const float*>(keys[k + 2]);
    const auto* key3 = reinterpret_cast<const float*>(keys[k + 3]);
    for (std::int64_t c = 0; c < width; c += 4) {
      const std::int64_t* start = starts.start + c % kChains;
      float* to = transposed + c / kChains * kTileKeys + k;
      const auto r0 = hn::LoadU(d, key0 + c);
      const auto r1 = hn::LoadU(d, key1 + c);
      const auto r2 = hn::LoadU(d, key2 + c);
      const auto r3 = hn::LoadU(d, key3 + c);
      const auto low01 = hn::InterleaveLower(d, r0, r1);
      const auto low23 = hn::InterleaveLower(d, r2, r3);
      const auto high01 = hn::InterleaveUpper(d, r0, r1);
      const auto high23 = hn::InterleaveUpper(d, r2, r3);
      hn::StoreU(hn::ConcatLowerLower(d, low23, low01), d, to + start[0] * kTileKeys);
      hn::StoreU(hn::ConcatUpperUpper(d, low23, low01), d, to + start[1] * kTileKeys);
      hn::StoreU(hn::ConcatLowerLower(d, high23, high01), d, to + start[2] * kTileKeys);
      hn::StoreU(hn::ConcatUpperUpper(d, high23, high01), d, to + start[3] * kTileKeys);
    }
  }
}

template <int kRows, int kVectors>
HWY_INLINE void add_sums(const FloatVec (&from)[kRows][kVectors], FloatVec (&to)[kRows][kVectors]) {
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) to[r][v] = hn::Add(to[r][v], from[r][v]);
  }
}

// The chain that starts at channel c. Returns where the next one lies in `transposed`.
template <int kRows, int kVectors>
HWY_INLINE const float* sum_chain(const float* query, std::int64_t width, std::int64_t c, const float* transposed,
                                  FloatVec (&sum)[kRows][kVectors]) {
  const FloatTag d;
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::Zero(d);
  }
  for (; c < width; c += kChains, transposed += kTileKeys) {
    FloatVec key[kVectors];
    for (int v = 0; v < kVectors; ++v) key[v] = hn::Load(d, transposed + v * kChains);
    for (int r = 0; r < kRows; ++r) {
      const FloatVec q = hn::Set(d, query[r * width + c]);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(q, key[v], sum[r][v]);
    }
  }
  return transposed;
}

// The four chains of a block of sum_lanes().
template <int kRows, int kVectors>
HWY_INLINE const float* sum_block_chains(const float* query, std::int64_t width, std::int64_t block,
                                         const float* transposed, FloatVec (&sum)[kRows][kVectors]) {
  FloatVec odd[kRows][kVectors], other[kRows][kVectors];
  transposed = sum_chain(query, width, 4 * block, transposed, sum);
  transposed = sum_chain(query, width, 4 * block + 2, transposed, other);
  add_sums(other, sum);
  transposed = sum_chain(query, width, 4 * block + 1, transposed, odd);
  transposed = sum_chain(query, width, 4 * block + 3, transposed, other);
  add_sums(other, odd);
  add_sums(odd, sum);
  return transposed;
}

// scores[r][k] = query[r] . key k, for kRows rows and kVectors vectors of keys.
template <int kRows, int kVectors>
HWY_NOINLINE void score_block(const float* query, std::int64_t width, const float* transposed, float* scores) {
  FloatVec even[kRows][kVectors], first[kRows][kVectors];
  for (std::int64_t i = 0; i < kChains / 4; ++i) {
    FloatVec sum[kRows][kVectors];
    transposed = sum_block_chains(query, width, kChains == 16 ? kEvenFirst[i] : i, transposed, sum);
    if (i % 2 == 1) add_sums(first, sum);
    if (i == 3) add_sums(even, sum);
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        if (i + 1 == kChains / 4) {
          hn::Store(sum[r][v], FloatTag(), scores + r * kTileKeys + v * kChains);
        } else {
          (i == 1 ? even : first)[r][v] = sum[r][v];
        }
      }
    }
  }
}

// sums[r][c] += sum over keys k in [begin, end) of weights[r][k] * values[k][c], for kRows rows and kVectors vectors of
// channels.
template <int kRows, int kVectors>
HWY_NOINLINE void value_block(const float* weights, const std::uint8_t* const* values, std::int64_t begin,
                              std::int64_t end, std::int64_t column, std::int64_t sums_stride, float* sums) {
  const FloatTag d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  FloatVec sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::Load(d, sums + r * sums_stride + v * lanes);
  }
  for (std::int64_t k = begin; k < end; ++k) {
    const float* from = reinterpret_cast<const float*>(values[k]) + column;
    FloatVec value[kVectors];
    for (int v = 0; v < kVectors; ++v) value[v] = hn::LoadU(d, from + v * lanes);
    for (int r = 0; r < kRows; ++r) {
      const FloatVec w = hn::Set(d, weights[r * kTileKeys + k]);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(w, value[v], sum[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) hn::Store(sum[r][v], d, sums + r * sums_stride + v * lanes);
  }
}

// Vectors of the register block. 4 rows x 4 fills AVX-512's and NEON's registers well; AVX2 and SSE have 16 only.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4
inline constexpr int kBlockVectors = 2;
#else
inline constexpr int kBlockVectors = 4;
#endif
inline constexpr int kScoreVectors = 2;           // half a block: the sums of other chains wait in registers
inline constexpr int kScoreRows = kBlockVectors;  // against four keys at a time (stream-inl.h)

// Scores of keys from `first` on, which transposed and scores point at.
template <int kVectors>
HWY_INLINE void score_rows(const float* query, std::int64_t rows, std::int64_t width, const float* transposed,
                           std::int64_t first, const BlockKeys* blocks, float* scores) {
  const auto sees_none = [&](std::int64_t r) {
    const BlockKeys& keys = blocks[r / kBlockRows];
    return keys.end <= first || keys.begin >= first + kVectors * kChains;
  };
  std::int64_t r = 0;
  for (; r + kBlockRows <= rows; r += kBlockRows) {
    if (sees_none(r)) continue;
    score_block<kBlockRows, kVectors>(query + r * width, width, transposed, scores + r * kTileKeys);
  }
  if (r == rows || sees_none(r)) return;
  query += r * width;
  scores += r * kTileKeys;
  switch (rows - r) {
    case 1: score_block<1, kVectors>(query, width, transposed, scores); break;
    case 2: score_block<2, kVectors>(query, width, transposed, scores); break;
    case 3: score_block<3, kVectors>(query, width, transposed, scores); break;
    default: break;
  }
}

// The scores of a tile that blocks of rows see; others may stay as they are. key_count is a multiple of kPad.
HWY_INLINE void score_tile(const float* query, std::int64_t rows, std::int64_t width, const float* transposed,
                           std::int64_t key_count, const BlockKeys* blocks, float* scores) {
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(FloatTag()));
  std::int64_t k = 0;
  for (; k + kScoreVectors * lanes <= key_count; k += kScoreVectors * lanes) {
    score_rows<kScoreVectors>(query, rows, width, transposed + k, k, blocks, scores + k);
  }
  for (; k < key_count; k += lanes) score_rows<1>(query, rows, width, transposed + k, k, blocks, scores + k);
}

template <int kVectors>
HWY_INLINE void value_rows(const float* weights, std::int64_t rows, const std::uint8_t* const* values,
                           const BlockKeys* blocks, std::int64_t column, std::int64_t stride, float* sums) {
  std::int64_t r = 0;
  for (; r + kBlockRows <= rows; r += kBlockRows) {
    const BlockKeys& keys = blocks[r / kBlockRows];
    value_block<kBlockRows, kVectors>(weights + r * kTileKeys, values, keys.begin, keys.end, column, stride,
                                      sums + r * stride + column);
  }
  if (r == rows) return;
  const std::int64_t begin = blocks[r / kBlockRows].begin;
  const std::int64_t end = blocks[r / kBlockRows].end;
  weights += r * kTileKeys;
  sums += r * stride + column;
  switch (rows - r) {
    case 1: value_block<1, kVectors>(weights, values, begin, end, column, stride, sums); break;
    case 2: value_block<2, kVectors>(weights, values, begin, end, column, stride, sums); break;
    case 3: value_block<3, kVectors>(weights, values, begin, end, column, stride, sums); break;
    default: break;
  }
}

// sums += weights * values over the keys that each block of rows sees; stride = padded width of sums' rows, which every
// value row can be read to.
HWY_INLINE void accumulate_values(const float* weights, std::int64_t rows, const std::uint8_t* const* values,
                                  const BlockKeys* blocks, std::int64_t stride, float* sums) {
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(FloatTag()));
  std::int64_t column = 0;
  for (; column + kBlockVectors * lanes <= stride; column += kBlockVectors * lanes) {
    value_rows<kBlockVectors>(weights, rows, values, blocks, column, stride, sums);
  }
  for (; column < stride; column += lanes) value_rows<1>(weights, rows, values, blocks, column, stride, sums);
}

// The same sums in the same order, but keys of weight 0 are left out: 0 * infinity would be NaN. Slow; for tiles in
// which some value is not finite.
HWY_INLINE void accumulate_nonzero(const float* weights, std::int64_t rows, const std::uint8_t* const* values,
                                   std::int64_t begin, std::int64_t end, std::int64_t stride, float* sums) {
  const FloatTag d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t r = 0; r < rows; ++r, weights += kTileKeys, sums += stride) {
    for (std::int64_t k = begin; k < end; ++k) {
      if (weights[k] == 0.0f) continue;
      const FloatVec w = hn::Set(d, weights[k]);
      const auto* value = reinterpret_cast<const float*>(values[k]);
      for (std::int64_t c = 0; c < stride; c += lanes) {
        hn::Store(hn::MulAdd(w, hn::LoadU(d, value + c), hn::Load(d, sums + c)), d, sums + c);
      }
    }
  }
}

// Whether any of the first `width` numbers of a row is infinite or NaN.
HWY_INLINE bool has_non_finite(const float* row, std::int64_t width) {
  const FloatTag d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  FloatVec differences = hn::Zero(d);  // x - x: 0 for finite numbers, NaN for the others
  std::int64_t c = 0;
  for (; c + lanes <= width; c += lanes) {
    const FloatVec x = hn::Load(d, row + c);
    differences = hn::Add(differences, hn::Sub(x, x));
  }
  float difference = hn::GetLane(hn::SumOfLanes(d, differences));
  for (; c < width; ++c) difference += row[c] - row[c];
  return difference != 0.0f;
}

// to[i] = a * to[i] + b * from[i]
HWY_INLINE void scale_add(float a, float b, const float* from, std::int64_t count, float* to) {
  const FloatTag d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t i = 0; i < count; i += lanes) {
    const FloatVec scaled = hn::Mul(hn::Set(d, a), hn::Load(d, to + i));
    hn::Store(hn::MulAdd(hn::Set(d, b), hn::Load(d, from + i), scaled), d, to + i);
  }
}

HWY_INLINE void scale_by(float a, std::int64_t count, float* to) {
  const FloatTag d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t i = 0; i < count; i += lanes) hn::Store(hn::Mul(hn::Set(d, a), hn::Load(d, to + i)), d, to + i);
}

// The largest of `key_count` scores after those that are not visible, a bit per key, have become -infinity.
HWY_INLINE float mask_scores(float* scores, std::int64_t key_count, std::uint64_t visible) {
  const FloatTag d;
  const FloatVec excluded = hn::Set(d, -std::numeric_limits<float>::infinity());
  FloatVec highest = excluded;
  if (static_cast<std::int64_t>(std::countr_one(visible)) >= key_count) {
    for (std::int64_t k = 0; k < key_count; k += kChains) highest = hn::Max(highest, hn::Load(d, scores + k));
  } else {
    for (std::int64_t k = 0; k < key_count; k += kChains) {
      const std::uint64_t bits = visible >> k;
      const auto mask = hn::LoadMaskBits(d, reinterpret_cast<const std::uint8_t*>(&bits));
      const FloatVec s = hn::IfThenElse(mask, hn::Load(d, scores + k), excluded);
      hn::Store(s, d, scores + k);
      highest = hn::Max(highest, s);
    }
  }
  return hn::GetLane(hn::MaxOfLanes(d, highest));
}

// One row of a tile: scores become exp(score - maximum), with the state's maximum and weight brought up to date.
// `visible` has a bit per key. Returns what the row's sums so far must be multiplied by.
HWY_INLINE float softmax_row(float* scores, std::int64_t key_count, std::uint64_t visible, float& maximum,
                             float& weight) {
  const FloatTag d;
  const float before = maximum;
  maximum = std::max(before, mask_scores(scores, key_count, visible));
  // With nothing attended yet, any finite reference keeps exp(-inf - reference) at 0 and lets a NaN score through.
  const float reference = maximum == -std::numeric_limits<float>::infinity() ? 0.0f : maximum;
  FloatVec total = hn::Zero(d);
  for (std::int64_t k = 0; k < key_count; k += kChains) {
    const FloatVec p = exp_nonpositive(d, hn::Sub(hn::Load(d, scores + k), hn::Set(d, reference)));
    hn::Store(p, d, scores + k);
    total = hn::Add(total, p);
  }
  const float correction = before == maximum ? 1.0f : std::exp(before - reference);
  weight = weight * correction + hn::GetLane(hn::SumOfLanes(d, total));
  return correction;
}

}  // namespace octavo::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
