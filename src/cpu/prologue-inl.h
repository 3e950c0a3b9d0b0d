// Rows of Q, K and V before attention: QK-norm, RoPE, quantise, store. Included once per target by kernels.cc.

HWY_BEFORE_NAMESPACE();
namespace octavo::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// x[c] *= weight[c] / sqrt(mean(x^2) + epsilon)
HWY_INLINE void rms_norm(const float* weight, std::int64_t width, float epsilon, float* x) {
  double squares = 0.0;
  for (std::int64_t c = 0; c < width; ++c) squares += static_cast<double>(x[c]) * static_cast<double>(x[c]);
  const double mean = squares / static_cast<double>(width);
  const auto factor = static_cast<float>(1.0 / std::sqrt(mean + static_cast<double>(epsilon)));
  for (std::int64_t c = 0; c < width; ++c) x[c] = x[c] * factor * weight[c];
}

// Rotates rotary_dim channels from x on: pairs (i, i + rotary_dim/2), or (2i, 2i + 1) when interleaved.
HWY_INLINE void rotate(const float* cosine, const float* sine, std::int64_t half, bool interleaved, float* x) {
  const std::int64_t step = interleaved ? 2 : 1;
  const std::int64_t distance = interleaved ? 1 : half;
  for (std::int64_t i = 0; i < half; ++i) {
    const float a = x[i * step];
    const float b = x[i * step + distance];
    x[i * step] = a * cosine[i] - b * sine[i];
    x[i * step + distance] = b * cosine[i] + a * sine[i];
  }
}

// cos and sin of one position to scratch, if the call rotates.
HWY_INLINE void load_rotation(const Call& call, std::int64_t position, LaneScratch& scratch) {
  const Problem& problem = *call.problem;
  if (!problem.has(Feature::kRope)) return;
  const std::int64_t half = problem.rotary_dim / 2;
  const std::int64_t row = position * half * static_cast<std::int64_t>(size_in_bytes(problem.element_type));
  const DecodeRow decode = decoder(problem.element_type);
  decode(call.cos + row, half, scratch.cosine);
  decode(call.sin + row, half, scratch.sine);
}

HWY_INLINE void normalise_and_rotate(const Problem& problem, const LaneScratch& scratch, float* x) {
  if (problem.has(Feature::kQkNorm)) rms_norm(scratch.norm_weight, problem.head_size, problem.qk_norm_epsilon, x);
  if (problem.has(Feature::kRope)) {
    rotate(scratch.cosine, scratch.sine, problem.rotary_dim / 2, problem.rotary_interleaved, x + problem.rotary_offset);
  }
}

template <class Products>
HWY_INLINE void load_head_queries(const Call& call, const Tile& tile, LaneScratch& scratch) {
  const Problem& problem = *call.problem;
  const std::int64_t group = problem.group_size();
  const std::int64_t width = problem.head_size;
  const DecodeRow decode = decoder(problem.element_type);
  if (problem.has(Feature::kQkNorm)) decode(call.q_norm, width, scratch.norm_weight);
  float* to = scratch.query.floats;
  for (std::int64_t j = tile.token_begin; j < tile.token_end; ++j) {
    const std::int64_t token = call.cumulative[tile.sequence] + j;
    load_rotation(call, call.position(tile.sequence, j), scratch);
    for (std::int64_t h = 0; h < group; ++h, to += width) {
      decode(call.query.row(token, tile.kv_head * group + h), width, to);
      normalise_and_rotate(problem, scratch, to);
      call.k_cache.apply_scale(tile.kv_head, width, problem.scale, width, to);
    }
  }
  const StreamKernels kernels = Products::of(call.k_cache.type, width);
  if (kernels.split != nullptr) kernels.split(scratch.query, tile.rows(group), width);
}

template <class Products>
HWY_INLINE void load_queries(const Call& call, const Tile& tile, LaneScratch& scratch) {
  const std::int64_t rows = tile.rows_per_head(call.problem->group_size());
  for (std::int64_t h = 0; h < tile.head_count; ++h) {
    LaneScratch head_scratch = scratch.from_row(*call.problem, h * rows);
    load_head_queries<Products>(call, tile.head(h), head_scratch);
  }
}

// Where a token's K and V go: false = nowhere (slot -1, or an unmapped block).
HWY_INLINE bool find_slot(const Call& call, std::int64_t sequence, std::int64_t j, std::int64_t& block,
                          std::int64_t& slot) {
  const Problem& problem = *call.problem;
  if (call.slot_mapping.data != nullptr) {
    const std::int64_t flat = call.slot_mapping[call.cumulative[sequence] + j];
    if (flat < 0) return false;
    block = flat / problem.block_size;
    slot = flat % problem.block_size;
    return true;
  }
  const std::int64_t position = call.past[sequence] + j;
  block = call.block_table[sequence * problem.max_blocks_per_sequence + position / problem.block_size];
  slot = position % problem.block_size;
  return block >= 0;
}

HWY_INLINE void store_tokens(const Call& call, std::int64_t begin, std::int64_t end, LaneScratch& scratch) {
  const Problem& problem = *call.problem;
  const std::int64_t width = problem.head_size;
  const DecodeRow decode = decoder(problem.element_type);
  const bool separate = problem.cache_layout == CacheLayout::kSeparate;
  if (problem.has(Feature::kQkNorm)) decode(call.k_norm, width, scratch.norm_weight);
  std::int64_t sequence =
      std::upper_bound(call.cumulative, call.cumulative + problem.batch_size + 1, begin) - call.cumulative - 1;
  for (std::int64_t token = begin; token < end; ++token) {
    while (token >= call.cumulative[sequence + 1]) ++sequence;
    const std::int64_t j = token - call.cumulative[sequence];
    std::int64_t block = 0;
    std::int64_t slot = 0;
    if (!find_slot(call, sequence, j, block, slot)) continue;
    load_rotation(call, call.position(sequence, j), scratch);
    for (std::int64_t head = 0; head < problem.kv_num_heads; ++head) {
      decode(call.key.row(token, head), width, scratch.row);
      normalise_and_rotate(problem, scratch, scratch.row);
      encode_cache_row(call.k_cache, head, width, scratch.row, call.k_cache.row(block, slot, head));
      if (!separate) continue;
      decode(call.value.row(token, head), width, scratch.row);
      encode_cache_row(call.v_cache, head, width, scratch.row, call.v_cache.row(block, slot, head));
    }
  }
}

}  // namespace octavo::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
