// Rules S: every tensor against the sizes. Rules B: attention_metadata, the only tensor whose values validate() reads.
#include "contract/message.h"
#include "contract/rules.h"
#include "contract/tensors.h"

namespace octavo::contract {
namespace {

using enum TensorId;

std::string shape_is_expected(TensorId id, const Call& call, const char* advice) {
  const Tensor& row = tensor(id);
  const TensorView view = row.view(call.arguments);
  const Expectation expected = row.expectation(call.problem);
  if (expected.presence != Expectation::Presence::kNeeded || same_shape(view, expected.shape)) return {};
  return cat(row.name, ": shape must be ", row.dimensions, ", here ", shape_text(expected.shape), ", got ",
             shape_text(view), advice);
}

// Where the sizes come from, or what the tensor is for: what a user needs to know to mend the shape.
const char* shape_advice(TensorId id) {
  switch (id) {
    case kKey:
    case kValue: return "; it has query's tokens and head_size, and kv_num_heads heads";
    case kKeyCache: return "; head_size is taken from query";
    case kValueCache: return "; it has the blocks of key_cache, since block_table finds both";
    case kPastSeqlens:
    case kBlockTable: return "; batch_size is one less than the length of cumulative_sequence_length";
    case kSinCache: return "; it has the shape of cos_cache";
    case kSlotMapping: return "; give every token of query a slot, -1 = do not write";
    case kHeadSink: return "; give every query head one logit";
    case kQNormWeight:
    case kKNormWeight: return "; all heads share one weight a channel";
    case kKScale: return "; it follows k_quant_type";
    case kVScale: return "; it follows v_quant_type";
    case kQueryPositions: return "; give every token of query a position";
    case kOutputQk:
      return "; max_context_len is attention_metadata's bound of the KV length where it is given, else "
             "max_blocks_per_sequence*block_size";
    default: return "; allocate that shape";
  }
}

template <TensorId id>
std::string shape_of(const Call& call) {
  return shape_is_expected(id, call, shape_advice(id));
}

std::string bias_broadcast(const Call& call) {
  const Problem& p = call.problem;
  if (!call.arguments.attention_bias.present()) return {};
  const bool batch_fits = p.bias_batch == 1 || p.bias_batch == p.batch_size;
  const bool heads_fit = p.bias_heads == 1 || p.bias_heads == p.num_heads;
  if (batch_fits && heads_fit) return {};
  return cat("attention_bias: shape must be ", tensor(kAttentionBias).dimensions, " with batch_size = ", p.batch_size,
             " and num_heads = ", p.num_heads, ", got ", shape_text(call.arguments.attention_bias), "; 1 broadcasts");
}

std::string output_qk_shape(const Call& call) {
  Call bounded = call;
  apply_bounds(call, bounded.problem);
  return shape_of<kOutputQk>(bounded);
}

std::string metadata_shape(const Call& call) {
  const TensorView& metadata = call.arguments.attention_metadata;
  if (!metadata.present()) return {};
  if (metadata.rank == 1 && (metadata.shape[0] == 2 || metadata.shape[0] == 3)) return {};
  return cat("attention_metadata: shape must be (2) or (3), got ", shape_text(metadata),
             "; pass [bound of the query length, bound of the KV length, optional lower bound of the largest KV "
             "length], 0 = unknown");
}

std::string metadata_not_negative(const Call& call) {
  const TensorView& metadata = call.arguments.attention_metadata;
  const auto* bounds = static_cast<const std::int32_t*>(metadata.data);
  for (std::int64_t i = 0; i < metadata.element_count(); ++i) {
    if (bounds[i] < 0) {
      return cat("attention_metadata: bounds must not be negative, got ", bounds[i], " at index ", i,
                 "; 0 means unknown");
    }
  }
  return {};
}

std::string metadata_ordered(const Call& call) {
  const TensorView& metadata = call.arguments.attention_metadata;
  if (metadata.element_count() != 3) return {};
  const auto* bounds = static_cast<const std::int32_t*>(metadata.data);
  if (bounds[1] == 0 || bounds[2] <= bounds[1]) return {};
  return cat(
      "attention_metadata: the lower bound of the largest KV length (index 2) must not exceed the upper one "
      "(index 1), got ",
      bounds[2], " and ", bounds[1], "; 0 means unknown");
}

constexpr Rule kShapeRules[] = {
    {"S1", "key is (token_count, kv_num_heads*head_size).", shape_of<kKey>},
    {"S2", "value is (token_count, kv_num_heads*head_size).", shape_of<kValue>},
    {"S3", "key_cache is (num_blocks, block_size, kv_num_heads, head_size), 4-bit: head_size/2 bytes.",
     shape_of<kKeyCache>},
    {"S4", "value_cache has key_cache's first three extents and head_size channels, 4-bit: head_size/2 bytes.",
     shape_of<kValueCache>},
    {"S5", "past_seqlens is (batch_size).", shape_of<kPastSeqlens>},
    {"S6", "block_table is (batch_size, max_blocks_per_sequence).", shape_of<kBlockTable>},
    {"S7", "With do_rotary = 1, sin_cache has the shape of cos_cache.", shape_of<kSinCache>},
    {"S8", "slot_mapping is (token_count).", shape_of<kSlotMapping>},
    {"S9", "head_sink is (num_heads).", shape_of<kHeadSink>},
    {"S10", "q_norm_weight is (head_size).", shape_of<kQNormWeight>},
    {"S11", "k_norm_weight is (head_size).", shape_of<kKNormWeight>},
    {"S12", "k_scale is (1) for PER_TENSOR, (kv_num_heads, 1, head_size) for PER_CHANNEL.", shape_of<kKScale>},
    {"S13", "v_scale is (1) for PER_TENSOR, (kv_num_heads, 1, head_size) for PER_CHANNEL.", shape_of<kVScale>},
    {"S14", "query_positions is (token_count).", shape_of<kQueryPositions>},
    {"S15", "attention_bias is (batch_size or 1, num_heads or 1, query capacity, context capacity).", bias_broadcast},
    {"S16", "output is (token_count, num_heads*v_head_size), v_head_size 0 meaning head_size.", shape_of<kOutput>},
    {"S17", "lse is (num_heads, token_count).", shape_of<kLse>},
};

constexpr Rule kBoundRules[] = {
    {"B1", "attention_metadata is (2) or (3).", metadata_shape},
    {"B2", "The values of attention_metadata are not negative.", metadata_not_negative},
    {"B3", "attention_metadata[2] is at most attention_metadata[1], unless that is 0 (unknown).", metadata_ordered},
    {"B4", "output_qk is (num_heads, token_count, max_context_len).", output_qk_shape},
};

}  // namespace

std::span<const Rule> shape_rules() noexcept {
  return kShapeRules;
}
std::span<const Rule> bound_rules() noexcept {
  return kBoundRules;
}

}  // namespace octavo::contract
