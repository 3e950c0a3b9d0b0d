#include "contract/tensors.h"

namespace octavo::contract {
namespace {

using Presence = Expectation::Presence;
using Shape = std::initializer_list<std::int64_t>;

template <auto Member>
TensorView view_of(const Arguments& arguments) {
  return arguments.*Member;
}

Expectation expect(bool needed, ElementType type, Shape shape) {
  Expectation expected{needed ? Presence::kNeeded : Presence::kAbsent, type, {}};
  for (const std::int64_t extent : shape) {
    expected.shape.shape[static_cast<std::size_t>(expected.shape.rank++)] = extent;
  }
  return expected;
}

bool is_separate(const Problem& p) {
  return p.cache_layout == CacheLayout::kSeparate;
}

// Stored elements of one cache row: channels, or bytes where two 4-bit channels share one.
std::int64_t row_width(const CacheFormat& format, std::int64_t head_size) {
  return format.storage == ElementType::kUint8 ? (head_size + 1) / 2 : head_size;
}

Expectation query(const Problem& p) {
  const std::int64_t heads = p.has(Feature::kPackedQkv) ? p.num_heads + 2 * p.kv_num_heads : p.num_heads;
  return expect(true, p.element_type, {p.token_count, heads * p.head_size});
}

Expectation key(const Problem& p) {
  return expect(!p.has(Feature::kPackedQkv), p.element_type, {p.token_count, p.kv_num_heads * p.head_size});
}

Expectation value(const Problem& p) {
  return expect(is_separate(p) && !p.has(Feature::kPackedQkv), p.element_type,
                {p.token_count, p.kv_num_heads * p.head_size});
}

Expectation key_cache(const Problem& p) {
  return expect(true, p.k_cache.storage,
                {p.num_blocks, p.block_size, p.kv_num_heads, row_width(p.k_cache, p.head_size)});
}

Expectation value_cache(const Problem& p) {
  return expect(is_separate(p), p.v_cache.storage,
                {p.num_blocks, p.block_size, p.kv_num_heads, row_width(p.v_cache, p.head_size)});
}

Expectation cumulative_sequence_length(const Problem& p) {
  return expect(true, ElementType::kInt32, {p.batch_size + 1});
}

Expectation past_seqlens(const Problem& p) {
  return expect(true, ElementType::kInt32, {p.batch_size});
}

Expectation block_table(const Problem& p) {
  return expect(true, p.index_type, {p.batch_size, p.max_blocks_per_sequence});
}

Expectation rotary_cache(const Problem& p) {
  Expectation expected = expect(true, p.element_type, {p.rotary_max_positions, p.rotary_dim / 2});
  if (!p.has(Feature::kRope)) expected.presence = Presence::kIgnored;
  return expected;
}

Expectation slot_mapping(const Problem& p) {
  return expect(p.has(Feature::kSlotMapping), p.index_type, {p.token_count});
}

Expectation head_sink(const Problem& p) {
  return expect(p.has(Feature::kHeadSink), p.element_type, {p.num_heads});
}

Expectation norm_weight(const Problem& p) {
  return expect(p.has(Feature::kQkNorm), p.element_type, {p.head_size});
}

Expectation scale(const Problem& p, QuantType quant, bool has_cache) {
  const bool needed = has_cache && quant != QuantType::kNone;
  if (quant == QuantType::kPerChannel) return expect(needed, ElementType::kFloat32, {p.kv_num_heads, 1, p.head_size});
  return expect(needed, ElementType::kFloat32, {1});
}

Expectation k_scale(const Problem& p) {
  return scale(p, p.k_cache.quant, true);
}

Expectation v_scale(const Problem& p) {
  return scale(p, p.v_cache.quant, is_separate(p));
}

// validate() has read its values into the Problem; nothing reads it afterwards.
Expectation attention_metadata(const Problem&) {
  return {Presence::kIgnored, ElementType::kInt32, {}};
}

Expectation query_positions(const Problem& p) {
  return expect(p.has(Feature::kQueryPositions), ElementType::kInt32, {p.token_count});
}

Expectation attention_bias(const Problem& p) {
  return expect(p.has(Feature::kAttentionBias), p.element_type,
                {p.bias_batch, p.bias_heads, p.bias_query_capacity, p.bias_context_capacity});
}

Expectation output(const Problem& p) {
  return expect(true, p.element_type, {p.token_count, p.num_heads * p.v_head_size});
}

Expectation output_qk(const Problem& p) {
  return expect(p.has(Feature::kOutputQk), p.output_qk_type, {p.num_heads, p.token_count, p.max_context_len});
}

Expectation lse(const Problem& p) {
  return expect(p.has(Feature::kLse), ElementType::kFloat32, {p.num_heads, p.token_count});
}

using enum TensorId;

constexpr const char* kCacheDimensions =
    "(num_blocks, block_size, kv_num_heads, head_size or head_size/2 bytes for a 4-bit cache)";
constexpr const char* kScaleDimensions = "(1) for PER_TENSOR or (kv_num_heads, 1, head_size) for PER_CHANNEL";

constexpr std::array kTensors = {
    Tensor{kQuery, "query", false, view_of<&Arguments::query>, query,
           "(token_count, num_heads*head_size), or (token_count, (num_heads + 2*kv_num_heads)*head_size) when packed"},
    Tensor{kKey, "key", false, view_of<&Arguments::key>, key, "(token_count, kv_num_heads*head_size)"},
    Tensor{kValue, "value", false, view_of<&Arguments::value>, value, "(token_count, kv_num_heads*head_size)"},
    Tensor{kKeyCache, "key_cache", true, view_of<&Arguments::key_cache>, key_cache, kCacheDimensions},
    Tensor{kValueCache, "value_cache", true, view_of<&Arguments::value_cache>, value_cache, kCacheDimensions},
    Tensor{kCumulativeSequenceLength, "cumulative_sequence_length", false,
           view_of<&Arguments::cumulative_sequence_length>, cumulative_sequence_length, "(batch_size + 1)"},
    Tensor{kPastSeqlens, "past_seqlens", false, view_of<&Arguments::past_seqlens>, past_seqlens, "(batch_size)"},
    Tensor{kBlockTable, "block_table", false, view_of<&Arguments::block_table>, block_table,
           "(batch_size, max_blocks_per_sequence)"},
    Tensor{kCosCache, "cos_cache", false, view_of<&Arguments::cos_cache>, rotary_cache, "(max_seq_len, rotary_dim/2)"},
    Tensor{kSinCache, "sin_cache", false, view_of<&Arguments::sin_cache>, rotary_cache, "(max_seq_len, rotary_dim/2)"},
    Tensor{kSlotMapping, "slot_mapping", false, view_of<&Arguments::slot_mapping>, slot_mapping, "(token_count)"},
    Tensor{kHeadSink, "head_sink", false, view_of<&Arguments::head_sink>, head_sink, "(num_heads)"},
    Tensor{kQNormWeight, "q_norm_weight", false, view_of<&Arguments::q_norm_weight>, norm_weight, "(head_size)"},
    Tensor{kKNormWeight, "k_norm_weight", false, view_of<&Arguments::k_norm_weight>, norm_weight, "(head_size)"},
    Tensor{kKScale, "k_scale", false, view_of<&Arguments::k_scale>, k_scale, kScaleDimensions},
    Tensor{kVScale, "v_scale", false, view_of<&Arguments::v_scale>, v_scale, kScaleDimensions},
    Tensor{kAttentionMetadata, "attention_metadata", false, view_of<&Arguments::attention_metadata>, attention_metadata,
           "(2) or (3)"},
    Tensor{kQueryPositions, "query_positions", false, view_of<&Arguments::query_positions>, query_positions,
           "(token_count)"},
    Tensor{kAttentionBias, "attention_bias", false, view_of<&Arguments::attention_bias>, attention_bias,
           "(batch_size or 1, num_heads or 1, query capacity, context capacity)"},
    Tensor{kOutput, "output", false, view_of<&Arguments::output>, output,
           "(token_count, num_heads*v_head_size), v_head_size 0 meaning head_size"},
    Tensor{kOutputQk, "output_qk", false, view_of<&Arguments::output_qk>, output_qk,
           "(num_heads, token_count, max_context_len)"},
    Tensor{kLse, "lse", false, view_of<&Arguments::lse>, lse, "(num_heads, token_count)"},
};

constexpr bool in_order() {
  for (std::size_t i = 0; i < kTensors.size(); ++i) {
    if (static_cast<std::size_t>(kTensors[i].id) != i) return false;
  }
  return kTensors.size() == static_cast<std::size_t>(kLse) + 1;
}
static_assert(in_order(), "tensor() indexes the table by TensorId");

}  // namespace

std::span<const Tensor> tensors() noexcept {
  return kTensors;
}

const Tensor& tensor(TensorId id) noexcept {
  return kTensors[static_cast<std::size_t>(id)];
}

bool is_contiguous(const TensorView& view) noexcept {
  if (view.element_count() == 0) return true;
  std::int64_t stride = 1;
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    const auto i = static_cast<std::size_t>(axis);
    if (view.shape[i] != 1 && view.strides[i] != stride) return false;
    stride *= view.shape[i];
  }
  return true;
}

}  // namespace octavo::contract
