// Reduces a call that keeps the rules to a Problem.
#include <algorithm>
#include <bit>
#include <cmath>

#include "contract/rules.h"
#include "contract/tensors.h"

namespace octavo::contract {
namespace {

constexpr std::int64_t kOnnxMinBlockSize = 16;

CacheType logical_type(ElementType storage, CacheType dtype) {
  switch (storage) {
    case ElementType::kFloat32: return CacheType::kFloat32;
    case ElementType::kFloat16: return CacheType::kFloat16;
    case ElementType::kBFloat16: return CacheType::kBFloat16;
    case ElementType::kInt8: return CacheType::kInt8;
    case ElementType::kFloat8E4M3FN: return CacheType::kFloat8E4M3FN;
    default: return dtype;  // uint8: int4 or float4e2m1
  }
}

FeatureSet features(const Call& call, const Problem& problem) {
  const Arguments& arguments = call.arguments;
  FeatureSet set;
  const auto add = [&set](bool asked, Feature feature) {
    if (asked) set = set | feature;
  };
  const auto each_cache = [&problem](auto&& has) { return has(problem.k_cache) || has(problem.v_cache); };

  add(problem.cache_layout == CacheLayout::kLatent, Feature::kLatent);
  add(problem.cache_layout == CacheLayout::kSeparate && !arguments.key.present(), Feature::kPackedQkv);
  add(arguments.slot_mapping.present(), Feature::kSlotMapping);
  add(problem.rotary_dim > 0, Feature::kRope);
  add(arguments.q_norm_weight.present(), Feature::kQkNorm);
  add(arguments.head_sink.present(), Feature::kHeadSink);
  add(problem.softcap > 0, Feature::kSoftcap);
  add(problem.local_window_size > 0, Feature::kLocalWindow);
  add(!problem.is_causal, Feature::kNonCausal);
  add(arguments.attention_bias.present(), Feature::kAttentionBias);
  add(arguments.query_positions.present(), Feature::kQueryPositions);
  add(problem.qk_output != QkOutput::kNone, Feature::kOutputQk);
  add(arguments.lse.present(), Feature::kLse);
  add(each_cache([](const CacheFormat& f) { return f.quant != QuantType::kNone; }), Feature::kQuantizedCache);
  add(each_cache([](const CacheFormat& f) { return f.quant == QuantType::kPerChannel; }), Feature::kPerChannelScale);
  add(each_cache([](const CacheFormat& f) { return f.storage == ElementType::kUint8; }), Feature::kFourBitCache);
  add(!is_contiguous(arguments.key_cache) || !is_contiguous(arguments.value_cache), Feature::kStridedCache);
  add(problem.index_type == ElementType::kInt64, Feature::kInt64Indices);
  add(problem.block_size < kOnnxMinBlockSize || !std::has_single_bit(static_cast<std::uint64_t>(problem.block_size)),
      Feature::kSmallBlocks);
  return set;
}

}  // namespace

Problem build_problem(const Call& call) noexcept {
  const Arguments& arguments = call.arguments;
  const Attributes& attributes = call.attributes;
  Problem problem;

  problem.cache_layout = attributes.kv_cache_layout;
  problem.num_heads = attributes.num_heads;
  problem.kv_num_heads = attributes.kv_num_heads;
  const bool packed = problem.cache_layout == CacheLayout::kSeparate && !arguments.key.present();
  problem.token_count = arguments.query.shape[0];
  problem.head_size =
      arguments.query.shape[1] / (problem.num_heads + (packed ? 2 * problem.kv_num_heads : std::int64_t{0}));
  problem.v_head_size = attributes.v_head_size != 0 ? attributes.v_head_size : problem.head_size;
  problem.batch_size = arguments.cumulative_sequence_length.shape[0] - 1;
  problem.num_blocks = arguments.key_cache.shape[0];
  problem.block_size = arguments.key_cache.shape[1];
  problem.max_blocks_per_sequence = arguments.block_table.shape[1];
  if (attributes.do_rotary != 0) {
    problem.rotary_dim = 2 * arguments.cos_cache.shape[1];
    problem.rotary_max_positions = arguments.cos_cache.shape[0];
    problem.rotary_offset = attributes.rotary_offset;
    problem.rotary_interleaved = attributes.rotary_interleaved != 0;
  }
  if (arguments.attention_bias.present()) {
    const auto& shape = arguments.attention_bias.shape;
    problem.bias_batch = shape[0];
    problem.bias_heads = shape[1];
    problem.bias_query_capacity = shape[2];
    problem.bias_context_capacity = shape[3];
  }

  problem.max_query_len_bound = problem.token_count;
  problem.max_kv_len_bound = problem.context_capacity();
  problem.max_context_len = problem.max_kv_len_bound;

  problem.element_type = arguments.query.type;
  problem.index_type = arguments.block_table.type;
  problem.output_qk_type = arguments.output_qk.type;
  problem.k_cache = {arguments.key_cache.type, logical_type(arguments.key_cache.type, attributes.k_cache_dtype),
                     attributes.k_quant_type};
  problem.v_cache = problem.k_cache;
  if (problem.cache_layout == CacheLayout::kSeparate) {
    problem.v_cache = {arguments.value_cache.type, logical_type(arguments.value_cache.type, attributes.v_cache_dtype),
                       attributes.v_quant_type};
  }

  problem.qk_output = static_cast<QkOutput>(attributes.qk_output);
  problem.scale = attributes.scale != 0 ? attributes.scale : 1.0f / std::sqrt(static_cast<float>(problem.head_size));
  problem.softcap = attributes.softcap;
  problem.qk_norm_epsilon = attributes.qk_norm_epsilon;
  problem.local_window_size = attributes.local_window_size;
  problem.is_causal = attributes.is_causal != 0;
  problem.features = features(call, problem);
  return problem;
}

void apply_bounds(const Call& call, Problem& problem) noexcept {
  const TensorView& metadata = call.arguments.attention_metadata;
  if (!metadata.present()) return;
  const auto* bounds = static_cast<const std::int32_t*>(metadata.data);
  if (bounds[0] != 0) problem.max_query_len_bound = std::min<std::int64_t>(bounds[0], problem.max_query_len_bound);
  if (bounds[1] != 0) problem.max_kv_len_bound = std::min<std::int64_t>(bounds[1], problem.max_kv_len_bound);
  problem.max_context_len = problem.max_kv_len_bound;
}

}  // namespace octavo::contract
