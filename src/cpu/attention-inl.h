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
  std::uint64_t visible[kTileRows];     // per token: keys it sees
  std::int64_t begin = 0, end = 0;      // hull of `mapped`
  std::int64_t scored = 0;              // end, rounded up to whole vectors
  const std::uint8_t* keys[kTileKeys];  // rows of the cache; zeros for a key that is not mapped
  const std::uint8_t* values[kTileKeys];
};

// Finds the tile's live keys and their rows; every other key gets a row of zero bytes. False: nothing to attend to.
HWY_INLINE bool find_keys(const Call& call, const Tile& tile, const TokenRanges& ranges, std::int64_t base,
                          const LaneScratch& scratch, KeyTile& keys) {
  const Problem& problem = *call.problem;
  keys.base = base;
  std::uint64_t seen = 0;
  for (std::int64_t j = 0; j < ranges.count; ++j) {
    keys.visible[j] = bit_range(ranges.token[j].begin - base, ranges.token[j].end - base);
    seen |= keys.visible[j];
  }

  const bool latent = problem.cache_layout == CacheLayout::kLatent;
  const auto* zeros = reinterpret_cast<const std::uint8_t*>(scratch.zeros);
  for (std::int64_t k = 0; k < kTileKeys; ++k) keys.keys[k] = keys.values[k] = zeros;

  keys.mapped = 0;
  keys.begin = keys.end = keys.scored = 0;
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
      keys.keys[k] = reinterpret_cast<const std::uint8_t*>(call.k_cache.row(block, slot, tile.kv_head));
      keys.values[k] =
          latent ? keys.keys[k] : reinterpret_cast<const std::uint8_t*>(call.v_cache.row(block, slot, tile.kv_head));
    }
  }
  if (keys.mapped == 0) return false;
  keys.begin = std::countr_zero(keys.mapped);
  keys.end = 64 - std::countl_zero(keys.mapped);
  keys.scored = padded(keys.end);
  return true;
}

// The kernels that a call's K and V need.
struct CallKernels {
  StreamKernels keys, values;
};

template <class Products>
HWY_INLINE CallKernels kernels_of(const Call& call) {
  const Problem& problem = *call.problem;
  const Cache& v_cache = problem.cache_layout == CacheLayout::kLatent ? call.k_cache : call.v_cache;
  return {Products::of(call.k_cache.type, problem.head_size), Products::of(v_cache.type, problem.v_head_size)};
}

// Turns the rows of mapped keys into floats where the kernels do not take codes. Rows of float32 caches are copied all
// the same: every few rows of Q read values again, and in the cache a head's rows, a token's row apart, may all lie in
// the same sets of the first-level cache (a prompt of 1,024 tokens takes 1.2 times as long).
HWY_INLINE void decode_keys(const Call& call, const CallKernels& kernels, LaneScratch& scratch, KeyTile& keys) {
  const Problem& problem = *call.problem;
  const bool latent = problem.cache_layout == CacheLayout::kLatent;
  const std::int64_t key_stride = padded(problem.head_size);
  const std::int64_t value_stride = padded(problem.v_head_size);
  const bool decodes_keys = !kernels.keys.in_integers;
  const bool decodes_values = !kernels.values.in_integers;
  const bool shared = latent && decodes_keys;  // one decoded row for both
  const Cache& v_cache = latent ? call.k_cache : call.v_cache;
  const DecodeRow decode_key = decoder(call.k_cache.type);
  const DecodeRow decode_value = decoder(v_cache.type);
  for (std::uint64_t bits = keys.mapped; bits != 0; bits &= bits - 1) {
    const std::int64_t k = std::countr_zero(bits);
    if (decodes_keys) {
      float* key = scratch.keys + k * key_stride;
      decode_key(keys.keys[k], problem.head_size, key);
      keys.keys[k] = reinterpret_cast<const std::uint8_t*>(key);
    }
    if (!decodes_values) continue;
    if (shared) {
      keys.values[k] = keys.keys[k];
      continue;
    }
    float* value = scratch.values + k * value_stride;
    decode_value(keys.values[k], problem.v_head_size, value);
    keys.values[k] = reinterpret_cast<const std::uint8_t*>(value);
  }
}

// Rows [begin, end) of a tile.
struct RowRange {
  std::int64_t begin = 0, end = 0;
};

// The rows of a tile of one KV head that see any of the keys, in whole blocks, which Q's pieces are packed in: under a
// causal mask, few of those at the diagonal.
HWY_INLINE RowRange rows_that_see(const TokenRanges& ranges, const KeyTile& keys, std::int64_t group) {
  std::int64_t begin = 0, end = ranges.count;
  while ((keys.visible[begin] & keys.mapped) == 0) ++begin;  // some token sees a mapped key
  while ((keys.visible[end - 1] & keys.mapped) == 0) --end;
  const std::int64_t blocks_end = (end * group + kBlockRows - 1) / kBlockRows * kBlockRows;
  return {begin * group / kBlockRows * kBlockRows, std::min(ranges.count * group, blocks_end)};
}

// The keys that each block of these rows sees.
HWY_INLINE void find_block_keys(RowRange rows, const KeyTile& keys, std::int64_t group, BlockKeys* blocks) {
  for (std::int64_t first = rows.begin; first < rows.end; first += kBlockRows) {
    const std::int64_t last = std::min(first + kBlockRows, rows.end) - 1;
    std::uint64_t seen = 0;
    for (std::int64_t j = first / group; j <= last / group; ++j) seen |= keys.visible[j] & keys.mapped;
    blocks[(first - rows.begin) / kBlockRows] =
        seen == 0 ? BlockKeys{} : BlockKeys{std::countr_zero(seen), 64 - std::countl_zero(seen)};
  }
}

// scores = q.k; q already holds scale and K's quantisation scale. Of masked keys they are anything.
HWY_INLINE void multiply_keys(const Call& call, const CallKernels& kernels, RowRange rows, const KeyTile& keys,
                              const LaneScratch& scratch) {
  const std::int64_t width = call.problem->head_size;
  const std::int64_t count = rows.end - rows.begin;
  const LaneScratch of_rows = scratch.from_row(*call.problem, rows.begin);
  if (kernels.keys.in_integers) {
    LineStream nothing_ahead;
    kernels.keys.score(of_rows.query, count, width, keys.keys, keys.scored, nothing_ahead, of_rows.scores);
    return;
  }
  transpose_keys(keys.keys, keys.scored, width, scratch.transposed);
  score_tile(of_rows.query.floats, count, width, scratch.transposed, keys.scored, scratch.blocks, of_rows.scores);
}

// scores = softcap(scores) + bias
HWY_INLINE void adjust_scores(const Call& call, const Tile& tile, RowRange rows, const KeyTile& keys,
                              LaneScratch& scratch) {
  const Problem& problem = *call.problem;
  const std::int64_t group = problem.group_size();
  const FloatTag d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  if (problem.has(Feature::kSoftcap)) {
    const FloatVec cap = hn::Set(d, problem.softcap);
    for (std::int64_t r = rows.begin; r < rows.end; ++r) {
      float* scores = scratch.scores + r * kTileKeys;
      for (std::int64_t k = 0; k < keys.scored; k += lanes) {
        hn::Store(hn::Mul(cap, tanh(d, hn::Div(hn::Load(d, scores + k), cap))), d, scores + k);
      }
    }
  }
  if (problem.has(Feature::kAttentionBias)) {
    const DecodeRow decode = decoder(problem.element_type);
    const auto element_bytes = static_cast<std::int64_t>(size_in_bytes(problem.element_type));
    for (std::int64_t r = rows.begin; r < rows.end; ++r) {
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

HWY_INLINE void clear_state(const Problem& problem, std::int64_t rows, SoftmaxState& state) {
  std::fill_n(state.sums, rows * padded(problem.v_head_size), 0.0f);
  std::fill_n(state.maximum, rows, -std::numeric_limits<float>::infinity());
  std::fill_n(state.weight, rows, 0.0f);
}

// The positions of a chunk that a tile's rows see, from the start of a tile of keys.
HWY_INLINE contract::Range seen_of_chunk(const TokenRanges& ranges, std::int64_t chunk) {
  return {std::max(chunk * kChunkKeys, ranges.first / kTileKeys * kTileKeys),
          std::min((chunk + 1) * kChunkKeys, ranges.last)};
}

// Scores of rows of one KV head, as products, to weights; its state is brought up to date.
HWY_INLINE void weigh_scores(const Call& call, const Tile& tile, RowRange rows, const KeyTile& keys,
                             LaneScratch& scratch, SoftmaxState& state) {
  const Problem& problem = *call.problem;
  const std::int64_t group = problem.group_size();
  const std::int64_t stride = padded(problem.v_head_size);
  adjust_scores(call, tile, rows, keys, scratch);
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
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
}

// One KV head, keys decoded first unless the kernels take codes. kSkipMasked: masked positions' values are not even
// multiplied by 0 (accumulate_nonzero).
template <class Products, bool kSkipMasked>
HWY_INLINE void attend_decoded(const Call& call, const Tile& tile, std::int64_t chunk, LaneScratch& scratch,
                               SoftmaxState& state) {
  const Problem& problem = *call.problem;
  const std::int64_t group = problem.group_size();
  const std::int64_t stride = padded(problem.v_head_size);
  const CallKernels kernels = kernels_of<Products>(call);
  clear_state(problem, tile.rows(group), state);
  const TokenRanges ranges(call, tile);
  const contract::Range seen = seen_of_chunk(ranges, chunk);
  KeyTile keys;
  for (std::int64_t base = seen.begin; base < seen.end; base += kTileKeys) {
    if (!find_keys(call, tile, ranges, base, scratch, keys)) continue;
    const RowRange rows = rows_that_see(ranges, keys, group);
    find_block_keys(rows, keys, group, scratch.blocks);
    decode_keys(call, kernels, scratch, keys);
    multiply_keys(call, kernels, rows, keys, scratch);
    weigh_scores(call, tile, rows, keys, scratch, state);
    const std::int64_t count = rows.end - rows.begin;
    float* weights = scratch.scores + rows.begin * kTileKeys;
    float* sums = state.sums + rows.begin * stride;
    if (kernels.values.in_integers) {  // codes are finite
      LineStream nothing_ahead;
      kernels.values.accumulate(weights, count, keys.values, keys.begin, keys.end, problem.v_head_size, stride,
                                nothing_ahead, sums);
    } else if constexpr (kSkipMasked) {
      accumulate_nonzero(weights, count, keys.values, keys.begin, keys.end, stride, sums);
    } else {
      accumulate_values(weights, count, keys.values, scratch.blocks, stride, sums);
    }
  }
}

// The rows of a tile's keys or values, of one KV head after the other.
class HeadRows {
 public:
  HeadRows(const std::uint8_t* const* rows, std::uint64_t mapped, std::int64_t head_bytes) {
    for (std::int64_t k = 0; k < kTileKeys; ++k) {
      rows_[k] = rows[k];
      steps_[k] = (mapped >> k & 1) != 0 ? head_bytes : 0;
    }
  }
  const std::uint8_t* const* rows() const { return rows_; }
  void next_head() {
    for (std::int64_t k = 0; k < kTileKeys; ++k) rows_[k] += steps_[k];
  }

 private:
  const std::uint8_t* rows_[kTileKeys];
  std::int64_t steps_[kTileKeys];
};

// All KV heads of a tile of few rows. While keys are used, their values are fetched; while these are, the next keys.
template <class Products>
HWY_INLINE void attend_streamed(const Call& call, const Tile& tile, std::int64_t chunk, LaneScratch& scratch,
                                SoftmaxState& state) {
  const Problem& problem = *call.problem;
  const std::int64_t rows = tile.rows_per_head(problem.group_size());
  const std::int64_t stride = padded(problem.v_head_size);
  const bool latent = problem.cache_layout == CacheLayout::kLatent;
  const Cache& k_cache = call.k_cache;
  const Cache& v_cache = latent ? call.k_cache : call.v_cache;
  const CallKernels kernels = kernels_of<Products>(call);
  const auto lines_of_keys = [&](const KeyTile& keys) {
    return LineStream(keys.keys, keys.mapped, tile.head_count, k_cache.head_bytes,
                      kernels.keys.row_bytes(problem.head_size));
  };
  const auto lines_of_values = [&](const KeyTile& keys) {
    return LineStream(keys.values, keys.mapped, tile.head_count, v_cache.head_bytes,
                      kernels.values.row_bytes(problem.v_head_size));
  };

  clear_state(problem, tile.rows(problem.group_size()), state);
  const TokenRanges ranges(call, tile);
  const contract::Range seen = seen_of_chunk(ranges, chunk);
  if (seen.empty()) return;
  KeyTile tiles[2];
  int at = 0;
  find_keys(call, tile, ranges, seen.begin, scratch, tiles[0]);
  lines_of_keys(tiles[0]).fetch_rest();
  for (std::int64_t base = seen.begin; base < seen.end; base += kTileKeys, at ^= 1) {
    const KeyTile& keys = tiles[at];
    KeyTile& next = tiles[at ^ 1];
    find_keys(call, tile, ranges, base + kTileKeys, scratch, next);
    LineStream values_ahead = lines_of_values(keys);
    HeadRows key_rows(keys.keys, keys.mapped, k_cache.head_bytes);
    for (std::int64_t h = 0; h < tile.head_count; ++h, key_rows.next_head()) {
      const LaneScratch of_head = scratch.from_row(problem, h * rows);
      kernels.keys.score(of_head.query, rows, problem.head_size, key_rows.rows(), keys.scored, values_ahead,
                         of_head.scores);
    }
    values_ahead.fetch_rest();
    for (std::int64_t h = 0; h < tile.head_count && keys.mapped != 0; ++h) {
      LaneScratch head_scratch = scratch.from_row(problem, h * rows);
      SoftmaxState head_state = state.from_row(problem, h * rows);
      weigh_scores(call, tile.head(h), {0, rows}, keys, head_scratch, head_state);
    }
    LineStream keys_ahead = lines_of_keys(next);
    HeadRows value_rows(keys.values, keys.mapped, v_cache.head_bytes);
    for (std::int64_t h = 0; h < tile.head_count; ++h, value_rows.next_head()) {
      kernels.values.accumulate(scratch.scores + h * rows * kTileKeys, rows, value_rows.rows(), keys.begin, keys.end,
                                problem.v_head_size, stride, keys_ahead, state.sums + h * rows * stride);
    }
    keys_ahead.fetch_rest();
  }
}

template <class Products>
HWY_INLINE void attend_chunk(const Call& call, const Tile& tile, std::int64_t chunk, LaneScratch& scratch,
                             SoftmaxState& state) {
  const Problem& problem = *call.problem;
  const std::int64_t rows = tile.rows_per_head(problem.group_size());
  if (streams(problem, rows)) {
    attend_streamed<Products>(call, tile, chunk, scratch, state);
  } else {
    attend_decoded<Products, false>(call, tile, chunk, scratch, state);
  }
  // A value that overflowed is infinite, and a masked position takes part in nothing: rows that may not see it must
  // stay finite. That is too rare to pay for in every tile, so the chunk is done again where it shows.
  for (std::int64_t h = 0; h < tile.head_count; ++h) {
    LaneScratch head_scratch = scratch.from_row(problem, h * rows);
    SoftmaxState head_state = state.from_row(problem, h * rows);
    for (std::int64_t r = 0; r < rows; ++r) {
      if (!has_non_finite(head_state.sums + r * padded(problem.v_head_size), problem.v_head_size)) continue;
      attend_decoded<Products, true>(call, tile.head(h), chunk, head_scratch, head_state);
      break;
    }
  }
}

HWY_INLINE void fold(const Call& call, const Tile& tile, const SoftmaxState& next, SoftmaxState& into) {
  const std::int64_t rows = tile.rows(call.problem->group_size());
  const std::int64_t stride = padded(call.problem->v_head_size);
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  for (std::int64_t r = 0; r < rows; ++r) {
    if (next.maximum[r] == kNothing && next.weight[r] == 0.0f) continue;  // sees nothing of this chunk
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
template <class Products>
HWY_INLINE void write_probabilities(const Call& call, const Tile& tile, const SoftmaxState& state,
                                    LaneScratch& scratch) {
  const std::int64_t group = call.problem->group_size();
  const FloatTag d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const TokenRanges ranges(call, tile);
  const CallKernels kernels = kernels_of<Products>(call);
  KeyTile keys;
  load_head_queries<Products>(call, tile, scratch);
  for (std::int64_t base = ranges.first / kTileKeys * kTileKeys; base < ranges.last; base += kTileKeys) {
    if (!find_keys(call, tile, ranges, base, scratch, keys)) continue;
    const RowRange rows = rows_that_see(ranges, keys, group);
    find_block_keys(rows, keys, group, scratch.blocks);
    decode_keys(call, kernels, scratch, keys);
    multiply_keys(call, kernels, rows, keys, scratch);
    adjust_scores(call, tile, rows, keys, scratch);
    for (std::int64_t r = rows.begin; r < rows.end; ++r) {
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

template <class Products>
HWY_INLINE void finish_head(const Call& call, const Tile& tile, const SoftmaxState& state, LaneScratch& scratch) {
  const Problem& problem = *call.problem;
  const std::int64_t group = problem.group_size();
  const std::int64_t rows = tile.rows(group);
  for (std::int64_t r = 0; r < rows; ++r) {
    scratch.factors[r] = output_factor(call, tile.kv_head * group + r % group, state.maximum[r], state.weight[r]);
  }
  // Before the output: that may lie over the queries, which this reads again.
  if (problem.qk_output == QkOutput::kProbabilities) write_probabilities<Products>(call, tile, state, scratch);

  const std::int64_t width = problem.v_head_size;
  const Cache& v_cache = problem.cache_layout == CacheLayout::kLatent ? call.k_cache : call.v_cache;
  const auto element_bytes = static_cast<std::int64_t>(size_in_bytes(problem.element_type));
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t head = tile.kv_head * group + r % group;
    const std::int64_t token = call.cumulative[tile.sequence] + tile.token_begin + r / group;
    const float* sums = state.sums + r * padded(width);
    const float factor = scratch.factors[r];
    if (factor == 0.0f) {
      std::fill_n(scratch.row, width, 0.0f);
    } else {
      std::copy_n(sums, width, scratch.row);
      v_cache.apply_scale(tile.kv_head, problem.head_size, factor, width, scratch.row);
    }
    encode_row(problem.element_type, scratch.row, width,
               call.output + (token * problem.num_heads + head) * width * element_bytes);
    if (call.lse == nullptr) continue;
    const float weight = state.weight[r];
    call.lse[head * problem.token_count + token] =
        weight == 0.0f ? -std::numeric_limits<float>::infinity() : state.maximum[r] + std::log(weight);
  }
}

template <class Products>
HWY_INLINE void finish(const Call& call, const Tile& tile, const SoftmaxState& state, LaneScratch& scratch) {
  const std::int64_t rows = tile.rows_per_head(call.problem->group_size());
  for (std::int64_t h = 0; h < tile.head_count; ++h) {
    LaneScratch head_scratch = scratch.from_row(*call.problem, h * rows);
    finish_head<Products>(call, tile.head(h), state.from_row(*call.problem, h * rows), head_scratch);
  }
}

}  // namespace octavo::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
