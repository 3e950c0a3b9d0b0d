#include "cuda/call.h"

#include <algorithm>
#include <cstdint>

namespace octavo::cuda {
namespace {

bool multiple(std::int64_t value, std::int64_t of) {
  return value % of == 0;
}
bool multiple(const void* address, std::int64_t of) {
  return reinterpret_cast<std::uintptr_t>(address) % static_cast<std::uintptr_t>(of) == 0;
}

const std::byte* bytes_of(const TensorView& view) {
  return static_cast<const std::byte*>(view.data);
}

TokenRows make_rows(const std::byte* data, std::int64_t token_bytes, std::int64_t head_bytes) {
  return {data, token_bytes, head_bytes, multiple(data, 16) && multiple(token_bytes, 16) && multiple(head_bytes, 16)};
}

Cache make_cache(const MutableTensorView& view, const CacheFormat& format, const TensorView& scale) {
  const auto bytes = static_cast<std::int64_t>(size_in_bytes(view.type));
  Cache cache;
  cache.data = static_cast<std::byte*>(view.data);
  cache.block_bytes = view.strides[0] * bytes;
  cache.slot_bytes = view.strides[1] * bytes;
  cache.head_bytes = view.strides[2] * bytes;
  cache.type = format.logical;
  if (format.quant != QuantType::kNone) cache.scale = static_cast<const float*>(scale.data);
  cache.per_channel = format.quant == QuantType::kPerChannel;
  const std::int64_t unit = std::min<std::int64_t>(16, row_bytes(format.logical, 8));
  cache.aligned = multiple(cache.data, unit) && multiple(cache.block_bytes, unit) && multiple(cache.slot_bytes, unit) &&
                  multiple(cache.head_bytes, unit);
  return cache;
}

Indices make_indices(const TensorView& view) {
  return {view.data, view.type == ElementType::kInt64};
}

// Blocks that share out the keys of one row. Probabilities need the whole row's maximum in a second pass: never split.
std::int64_t chunk_count(const Problem& problem) {
  if (problem.qk_output == QkOutput::kProbabilities) return 1;
  return std::clamp<std::int64_t>((problem.max_kv_len_bound + kChunkKeys - 1) / kChunkKeys, 1, kMaxChunks);
}

}  // namespace

std::size_t carve(const Problem& problem, Carver& carver, Scratch& scratch) noexcept {
  scratch.chunks = static_cast<std::int32_t>(chunk_count(problem));
  scratch.records = carver.take<SequenceRecord>(problem.batch_size + 1);
  if (scratch.chunks > 1) {
    const std::int64_t rows = std::min(problem.token_count, kMaxSplitTokens * problem.batch_size) * problem.num_heads;
    scratch.sums = carver.take<float>(rows * scratch.chunks * problem.v_head_size);
    scratch.states = carver.take<float2>(rows * scratch.chunks);
  }
  return carver.used();
}

Call make_call(const Problem& problem, const Arguments& arguments, const Scratch& scratch) noexcept {
  const auto element = static_cast<std::int64_t>(size_in_bytes(problem.element_type));
  const std::int64_t head_bytes = problem.head_size * element;
  Call call;
  call.token_count = static_cast<std::int32_t>(problem.token_count);
  call.batch_size = static_cast<std::int32_t>(problem.batch_size);
  call.num_heads = static_cast<std::int32_t>(problem.num_heads);
  call.kv_num_heads = static_cast<std::int32_t>(problem.kv_num_heads);
  call.group = static_cast<std::int32_t>(problem.group_size());
  call.head_size = static_cast<std::int32_t>(problem.head_size);
  call.v_head_size = static_cast<std::int32_t>(problem.v_head_size);
  call.num_blocks = problem.num_blocks;
  call.block_size = problem.block_size;
  call.table_columns = problem.max_blocks_per_sequence;
  call.context_capacity = problem.context_capacity();
  call.rotary_max_positions = problem.rotary_max_positions;
  call.rotary_half = static_cast<std::int32_t>(problem.rotary_dim / 2);
  call.rotary_offset = static_cast<std::int32_t>(problem.rotary_offset);
  call.window = problem.local_window_size;
  call.max_context_len = problem.max_context_len;
  call.scale = problem.scale;
  call.softcap = problem.softcap;
  call.inverse_softcap = problem.softcap > 0.0f ? 1.0f / problem.softcap : 0.0f;
  call.norm_epsilon = problem.qk_norm_epsilon;
  call.causal = problem.is_causal;
  call.latent = problem.cache_layout == CacheLayout::kLatent;
  call.rotary_interleaved = problem.rotary_interleaved;
  call.qk_output = problem.qk_output;
  call.element_type = problem.element_type;
  call.output_qk_type = problem.output_qk_type;

  if (problem.has(Feature::kPackedQkv)) {
    const std::int64_t token_bytes = (problem.num_heads + 2 * problem.kv_num_heads) * head_bytes;
    const std::byte* query = bytes_of(arguments.query);
    call.query = make_rows(query, token_bytes, head_bytes);
    call.key = make_rows(query + problem.num_heads * head_bytes, token_bytes, head_bytes);
    call.value = make_rows(query + (problem.num_heads + problem.kv_num_heads) * head_bytes, token_bytes, head_bytes);
  } else {
    call.query = make_rows(bytes_of(arguments.query), problem.num_heads * head_bytes, head_bytes);
    call.key = make_rows(bytes_of(arguments.key), problem.kv_num_heads * head_bytes, head_bytes);
    call.value = make_rows(bytes_of(arguments.value), problem.kv_num_heads * head_bytes, head_bytes);
  }
  call.k_cache = make_cache(arguments.key_cache, problem.k_cache, arguments.k_scale);
  call.v_cache = call.latent ? call.k_cache : make_cache(arguments.value_cache, problem.v_cache, arguments.v_scale);
  call.cumulative = static_cast<const std::int32_t*>(arguments.cumulative_sequence_length.data);
  call.past = static_cast<const std::int32_t*>(arguments.past_seqlens.data);
  if (problem.has(Feature::kQueryPositions)) {
    call.positions = static_cast<const std::int32_t*>(arguments.query_positions.data);
  }
  call.block_table = make_indices(arguments.block_table);
  if (problem.has(Feature::kSlotMapping)) call.slot_mapping = make_indices(arguments.slot_mapping);
  if (problem.has(Feature::kRope)) {
    call.cos = arguments.cos_cache.data;
    call.sin = arguments.sin_cache.data;
  }
  if (problem.has(Feature::kHeadSink)) call.sink = arguments.head_sink.data;
  if (problem.has(Feature::kQkNorm)) {
    call.q_norm = arguments.q_norm_weight.data;
    call.k_norm = arguments.k_norm_weight.data;
  }
  if (problem.has(Feature::kAttentionBias)) {
    const std::int64_t plane = problem.bias_query_capacity * problem.bias_context_capacity;
    call.bias = arguments.attention_bias.data;
    call.bias_query_capacity = problem.bias_query_capacity;
    call.bias_context_capacity = problem.bias_context_capacity;
    call.bias_batch_stride = problem.bias_batch == 1 ? 0 : problem.bias_heads * plane;
    call.bias_head_stride = problem.bias_heads == 1 ? 0 : plane;
  }
  call.output = arguments.output.data;
  if (problem.qk_output != QkOutput::kNone) call.output_qk = arguments.output_qk.data;
  if (problem.has(Feature::kLse)) call.lse = static_cast<float*>(arguments.lse.data);
  call.scratch = scratch;
  return call;
}

}  // namespace octavo::cuda
