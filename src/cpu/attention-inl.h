// Attention of one tile of rows over chunks of keys, and its epilogue. Included once per target by kernels.cc.

HWY_BEFORE_NAMESPACE();
namespace octavo::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// What each token of a tile may see.
struct TokenRanges {
  contract::Range token[kTileRows];
  std::int64_t count = 0;
  std::int64_t first = std::numeric_limits<std::int64_t>::max(), last = 0;  // hull of all

  TokenRanges(const Call& call, const Tile& tile) {
    const std::int64_t kv_length = call.kv_length(tile.sequence);
    for (std::int64_t j = tile.token_begin; j < tile.token_end; ++j) {
      const contract::Range range = contract::visible_range(*call.problem, call.position(tile.sequence, j), kv_length);
      token[count++] = range;
      if (range.empty()) continue;
      first = std::min(first, range.begin);
      last = std::max(last, range.end);
    }
  }
};

// Bits [begin, end) of 64, for any begin and end.
HWY_INLINE std::uint64_t bit_range(std::int64_t begin, std::int64_t end) {
  begin = std::max<std::int64_t>(begin, 0);
  end = std::min<std::int64_t>(end, 64);
  if (begin >= end) return 0;
  const std::uint64_t below_end = end == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << end) - 1;
  return below_end & (~std::uint64_t{0} << begin);
}

// The keys of one tile.
struct KeyTile {
  std::int64_t base = 0;     // first position
  std::uint64_t mapped = 0;  // keys that some row sees and whose block is mapped: the only ones whose memory is read
  std::uint64_t visible[kTileRows];  // per token: keys it sees
  std::int64_t begin = 0, end = 0;   // hull of `mapped`
  std::int64_t scored = 0;           // end, rounded up to whole vectors
  const float* keys[kTileKeys];
  const float* values[kTileKeys];
};

// Decodes a cache row of `width` channels into `buffer`, or points at it where `in_place`.
HWY_INLINE const float* decoded_row(DecodeRow decode, const std::byte* row, std::int64_t width, bool in_place,
                                    float* buffer) {
  if (in_place && reinterpret_cast<std::uintptr_t>(row) % alignof(float) == 0)
    return reinterpret_cast<const float*>(row);
  decode(row, width, buffer);
  return buffer;
}

// Finds the tile's live keys and decodes their rows; every other key gets a row of zeros. False: nothing to attend to.
HWY_INLINE bool load_keys(const Call& call, const Tile& tile, const TokenRanges& ranges, std::int64_t base,
                          LaneScratch& scratch, KeyTile& keys) {
  const Problem& problem = *call.problem;
  keys.base = base;
  std::uint64_t seen = 0;
  for (std::int64_t j = 0; j < ranges.count; ++j) {
    keys.visible[j] = bit_range(ranges.token[j].begin - base, ranges.token[j].end - base);
    seen |= keys.visible[j];
  }

  const bool latent = problem.cache_layout == CacheLayout::kLatent;
  const std::int64_t key_stride = padded(problem.head_size);
  const std::int64_t value_stride = padded(problem.v_head_size);
  const DecodeRow decode_key = decoder(call.k_cache.type);
  const DecodeRow decode_value = decoder(call.v_cache.type);
  // The value loop reads whole vectors: rows may stay in the cache only where those end inside the row.
  const bool value_in_place = call.v_cache.type == CacheType::kFloat32 && value_stride <= problem.head_size;
  const bool key_in_place = call.k_cache.type == CacheType::kFloat32 && (!latent || value_stride <= problem.head_size);
  for (std::int64_t k = 0; k < kTileKeys; ++k) keys.keys[k] = keys.values[k] = scratch.zeros;

  keys.mapped = 0;
  std::uint64_t rest = seen;
  while (rest != 0) {
    // One block's share of the tile at a time: the block table is read for seen positions only.
    const std::int64_t first = std::countr_zero(rest);
    const std::int64_t column = (base + first) / problem.block_size;
    const std::int64_t block_base = column * problem.block_size - base;
    const std::uint64_t share = rest & bit_range(block_base, block_base + problem.block_size);
    rest &= ~share;
    const std::int64_t block = call.block_table[tile.sequence * problem.max_blocks_per_sequence + column];
    if (block < 0) continue;
    keys.mapped |= share;
    for (std::uint64_t bits = share; bits != 0; bits &= bits - 1) {
      const std::int64_t k = std::countr_zero(bits);
      const std::int64_t slot = k - block_base;
      keys.keys[k] = decoded_row(decode_key, call.k_cache.row(block, slot, tile.kv_head), problem.head_size,
                                 key_in_place, scratch.keys + k * key_stride);
      keys.values[k] = latent ? keys.keys[k]
                              : decoded_row(decode_value, call.v_cache.row(block, slot, tile.kv_head),
                                            problem.head_size, value_in_place, scratch.values + k * value_stride);
    }
  }
  if (keys.mapped == 0) return false;
  keys.begin = std::countr_zero(keys.mapped);
  keys.end = 64 - std::countl_zero(keys.mapped);
  keys.scored = padded(keys.end);
  return true;
}

// scores = softcap(q.k) + bias; q already holds scale and K's quantisation scale. Masked keys hold anything.
HWY_INLINE void compute_scores(const Call& call, const Tile& tile, const KeyTile& keys, LaneScratch& scratch) {
  const Problem& problem = *call.problem;
  const std::int64_t group = problem.group_size();
  const std::int64_t rows = (tile.token_end - tile.token_begin) * group;
  transpose_keys(keys.keys, keys.scored, problem.head_size, scratch.transposed);
  score_tile(scratch.query, rows, problem.head_size, scratch.transposed, keys.scored, scratch.scores);

  const FloatTag d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  if (problem.has(Feature::kSoftcap)) {
    const FloatVec cap = hn::Set(d, problem.softcap);
    for (std::int64_t r = 0; r < rows; ++r) {
      float* scores = scratch.scores + r * kTileKeys;
      for (std::int64_t k = 0; k < keys.scored; k += lanes) {
        hn::Store(hn::Mul(cap, tanh(d, hn::Div(hn::Load(d, scores + k), cap))), d, scores + k);
      }
    }
  }
  if (problem.has(Feature::kAttentionBias)) {
    const DecodeRow decode = decoder(problem.element_type);
    const auto element_bytes = static_cast<std::int64_t>(size_in_bytes(problem.element_type));
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t j = tile.token_begin + r / group;
      const std::int64_t head = tile.kv_head * group + r % group;
      const std::int64_t at = tile.sequence * call.bias_batch_stride + head * call.bias_head_stride +
                              j * problem.bias_context_capacity + keys.base + keys.begin;
      decode(call.bias + at * element_bytes, keys.end - keys.begin, scratch.bias);
      float* scores = scratch.scores + r * kTileKeys + keys.begin;
      for (std::int64_t k = 0; k < keys.end - keys.begin; ++k) scores[k] += scratch.bias[k];
    }
  }
}

// Writes output_qk for one row of one tile: `row` where visible, 0 elsewhere.
HWY_INLINE void write_output_qk(const Call& call, const Tile& tile, const KeyTile& keys, std::int64_t r,
                                std::uint64_t visible, float* row) {
  const Problem& problem = *call.problem;
  const std::int64_t group = problem.group_size();
  const std::int64_t head = tile.kv_head * group + r % group;
  const std::int64_t token = call.cumulative[tile.sequence] + tile.token_begin + r / group;
  const std::int64_t count = std::min(kTileKeys, call.kv_length(tile.sequence) - keys.base);
  for (std::int64_t k = 0; k < count; ++k) {
    if ((visible >> k & 1) == 0) row[k] = 0.0f;
  }
  const std::int64_t at = (head * problem.token_count + token) * problem.max_context_len + keys.base;
  encode_row(problem.output_qk_type, row, count,
             call.output_qk + at * static_cast<std::int64_t>(size_in_bytes(problem.output_qk_type)));
}

// kSkipMasked: masked positions' values are not even multiplied by 0 (accumulate_nonzero).
template <bool kSkipMasked>
HWY_INLINE void attend_keys(const Call& call, const Tile& tile, std::int64_t chunk, LaneScratch& scratch,
                            SoftmaxState& state) {
  const Problem& problem = *call.problem;
  const std::int64_t group = problem.group_size();
  const std::int64_t rows = (tile.token_end - tile.token_begin) * group;
  const std::int64_t stride = padded(problem.v_head_size);
  std::fill_n(state.sums, rows * stride, 0.0f);
  std::fill_n(state.maximum, rows, -std::numeric_limits<float>::infinity());
  std::fill_n(state.weight, rows, 0.0f);

  const TokenRanges ranges(call, tile);
  KeyTile keys;
  const std::int64_t begin = std::max(chunk * kChunkKeys, ranges.first / kTileKeys * kTileKeys);
  const std::int64_t end = std::min((chunk + 1) * kChunkKeys, ranges.last);
  for (std::int64_t base = begin; base < end; base += kTileKeys) {
    if (!load_keys(call, tile, ranges, base, scratch, keys)) continue;
    compute_scores(call, tile, keys, scratch);
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::uint64_t visible = keys.visible[r / group] & keys.mapped;
      float* scores = scratch.scores + r * kTileKeys;
      if (problem.qk_output == QkOutput::kScores) {
        alignas(64) float copy[kTileKeys];
        std::copy_n(scores, kTileKeys, copy);
        write_output_qk(call, tile, keys, r, visible, copy);
      }
      const float correction = softmax_row(scores, keys.scored, visible, state.maximum[r], state.weight[r]);
      if (correction != 1.0f) scale_by(correction, stride, state.sums + r * stride);
    }
    if constexpr (kSkipMasked) {
      accumulate_nonzero(scratch.scores, rows, keys.values, keys.begin, keys.end, stride, state.sums);
    } else {
      accumulate_values(scratch.scores, rows, keys.values, keys.begin, keys.end, stride, state.sums);
    }
  }
}

HWY_INLINE void attend_chunk(const Call& call, const Tile& tile, std::int64_t chunk, LaneScratch& scratch,
                             SoftmaxState& state) {
  attend_keys<false>(call, tile, chunk, scratch, state);
  // A value that overflowed is infinite, and a masked position takes part in nothing: rows that may not see it must
  // stay finite. That is too rare to pay for in every tile, so the chunk is done again where it shows.
  const std::int64_t rows = (tile.token_end - tile.token_begin) * call.problem->group_size();
  for (std::int64_t r = 0; r < rows; ++r) {
    if (!has_non_finite(state.sums + r * padded(call.problem->v_head_size), call.problem->v_head_size)) continue;
    attend_keys<true>(call, tile, chunk, scratch, state);
    return;
  }
}

HWY_INLINE void fold(const Call& call, const Tile& tile, const SoftmaxState& next, SoftmaxState& into) {
  const std::int64_t rows = (tile.token_end - tile.token_begin) * call.problem->group_size();
  const std::int64_t stride = padded(call.problem->v_head_size);
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  for (std::int64_t r = 0; r < rows; ++r) {
    const float maximum = std::max(into.maximum[r], next.maximum[r]);
    const float reference = maximum == kNothing ? 0.0f : maximum;
    const float old_factor = std::exp(into.maximum[r] - reference);
    const float new_factor = std::exp(next.maximum[r] - reference);
    scale_add(old_factor, new_factor, next.sums + r * stride, stride, into.sums + r * stride);
    into.weight[r] = old_factor * into.weight[r] + new_factor * next.weight[r];
    into.maximum[r] = maximum;
  }
}

// Second pass of output_qk = probabilities: the scores again, now that each row's maximum and denominator are known.
HWY_INLINE void write_probabilities(const Call& call, const Tile& tile, const SoftmaxState& state,
                                    LaneScratch& scratch) {
  const std::int64_t group = call.problem->group_size();
  const std::int64_t rows = (tile.token_end - tile.token_begin) * group;
  const FloatTag d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const TokenRanges ranges(call, tile);
  KeyTile keys;
  load_queries(call, tile, scratch);
  for (std::int64_t base = ranges.first / kTileKeys * kTileKeys; base < ranges.last; base += kTileKeys) {
    if (!load_keys(call, tile, ranges, base, scratch, keys)) continue;
    compute_scores(call, tile, keys, scratch);
    for (std::int64_t r = 0; r < rows; ++r) {
      const float maximum = state.maximum[r];
      const float reference = maximum == -std::numeric_limits<float>::infinity() ? 0.0f : maximum;
      float* scores = scratch.scores + r * kTileKeys;
      for (std::int64_t k = 0; k < keys.scored; k += lanes) {
        const FloatVec p = exp_nonpositive(d, hn::Sub(hn::Load(d, scores + k), hn::Set(d, reference)));
        hn::Store(hn::Mul(p, hn::Set(d, scratch.factors[r])), d, scores + k);
      }
      write_output_qk(call, tile, keys, r, keys.visible[r / group] & keys.mapped, scores);
    }
  }
}

// What turns a row's sums into its output: 1 / denominator, the sink in it; 0 where nothing was attended to.
HWY_INLINE float output_factor(const Call& call, std::int64_t head, float maximum, float weight) {
  if (weight == 0.0f) return 0.0f;
  if (call.sink == nullptr) return 1.0f / weight;
  const ElementType type = call.problem->element_type;
  float sink = 0.0f;
  decoder(type)(call.sink + head * static_cast<std::int64_t>(size_in_bytes(type)), 1, &sink);
  if (sink == std::numeric_limits<float>::infinity()) return 0.0f;
  const float reference = std::max(maximum, sink);
  const float numerator = std::exp(maximum - reference);
  return numerator / (weight * numerator + std::exp(sink - reference));
}

HWY_INLINE void finish(const Call& call, const Tile& tile, const SoftmaxState& state, LaneScratch& scratch) {
  const Problem& problem = *call.problem;
  const std::int64_t group = problem.group_size();
  const std::int64_t rows = (tile.token_end - tile.token_begin) * group;
  for (std::int64_t r = 0; r < rows; ++r) {
    scratch.factors[r] = output_factor(call, tile.kv_head * group + r % group, state.maximum[r], state.weight[r]);
  }
  // Before the output: that may lie over the queries, which this reads again.
  if (problem.qk_output == QkOutput::kProbabilities) write_probabilities(call, tile, state, scratch);

  const std::int64_t width = problem.v_head_size;
  const Cache& v_cache = problem.cache_layout == CacheLayout::kLatent ? call.k_cache : call.v_cache;
  const auto element_bytes = static_cast<std::int64_t>(size_in_bytes(problem.element_type));
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t head = tile.kv_head * group + r % group;
    const std::int64_t token = call.cumulative[tile.sequence] + tile.token_begin + r / group;
    const float* sums = state.sums + r * padded(width);
    const float factor = scratch.factors[r];
    for (std::int64_t c = 0; c < width; ++c) {
      scratch.row[c] = factor == 0.0f ? 0.0f : sums[c] * factor * v_cache.scale_of(tile.kv_head, c, problem.head_size);
    }
    encode_row(problem.element_type, scratch.row, width,
               call.output + (token * problem.num_heads + head) * width * element_bytes);
    if (call.lse == nullptr) continue;
    const float weight = state.weight[r];
    call.lse[head * problem.token_count + token] =
        weight == 0.0f ? -std::numeric_limits<float>::infinity() : state.maximum[r] + std::log(weight);
  }
}

}  // namespace octavo::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
