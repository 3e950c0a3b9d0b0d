#include "valid_call.h"

#include <gtest/gtest.h>

namespace octavo::test {
namespace {

TensorView view(const std::vector<std::int32_t>& values, std::initializer_list<std::int64_t> shape) {
  return {values.data(), ElementType::kInt32, shape};
}

}  // namespace

ValidCall::ValidCall(Base base) {
  attributes.num_heads = kHeads;
  attributes.kv_num_heads = kKvHeads;

  arguments.query = read({kTokens, kHeads * kHeadSize});
  arguments.key = read({kTokens, kKvHeads * kHeadSize});
  arguments.value = read({kTokens, kKvHeads * kHeadSize});
  arguments.key_cache = {keys.data(), ElementType::kFloat32, {kBlocks, kBlockSize, kKvHeads, kHeadSize}};
  arguments.value_cache = {values.data(), ElementType::kFloat32, {kBlocks, kBlockSize, kKvHeads, kHeadSize}};
  arguments.cumulative_sequence_length = view(offsets, {kBatch + 1});
  arguments.past_seqlens = view(past, {kBatch});
  arguments.block_table = view(table, {kBatch, kColumns});
  arguments.output = {results.data(), ElementType::kFloat32, {kTokens, kHeads * kHeadSize}};

  switch (base) {
    case Base::kPlain: break;
    case Base::kFull: add_options(); break;
    case Base::kPacked:
      arguments.query = read({kTokens, (kHeads + 2 * kKvHeads) * kHeadSize});
      arguments.key = arguments.value = {};
      break;
    case Base::kQuantized: quantize(); break;
    case Base::kLatent: make_latent(); break;
  }
}

void ValidCall::add_options() {
  attributes.do_rotary = 1;
  attributes.qk_output = 1;
  attributes.softcap = 30.0f;
  attributes.local_window_size = 20;
  arguments.cos_cache = read({64, kHeadSize / 2});
  arguments.sin_cache = read({64, kHeadSize / 2});
  arguments.slot_mapping = view(slots, {kTokens});
  arguments.head_sink = read({kHeads});
  arguments.q_norm_weight = read({kHeadSize});
  arguments.k_norm_weight = read({kHeadSize});
  arguments.attention_metadata = view(metadata, {3});
  arguments.query_positions = view(positions, {kTokens});
  arguments.attention_bias = read({kBatch, kHeads, 3, 48});
  arguments.output_qk = {scores.data(), ElementType::kFloat32, {kHeads, kTokens, 40}};
  arguments.lse = {log_sums.data(), ElementType::kFloat32, {kHeads, kTokens}};
}

void ValidCall::quantize() {
  attributes.k_quant_type = QuantType::kPerChannel;
  attributes.v_quant_type = QuantType::kPerTensor;
  attributes.v_cache_dtype = CacheType::kInt4;
  arguments.key_cache = {keys.data(), ElementType::kInt8, {kBlocks, kBlockSize, kKvHeads, kHeadSize}};
  arguments.value_cache = {values.data(), ElementType::kUint8, {kBlocks, kBlockSize, kKvHeads, kHeadSize / 2}};
  arguments.k_scale = {scales.data(), ElementType::kFloat32, {kKvHeads, 1, kHeadSize}};
  arguments.v_scale = {scales.data(), ElementType::kFloat32, {1}};
}

void ValidCall::make_latent() {
  attributes.kv_cache_layout = CacheLayout::kLatent;
  attributes.v_head_size = 8;
  attributes.scale = 0.5f;
  attributes.do_rotary = 1;
  attributes.rotary_offset = 8;
  arguments.value = {};
  arguments.value_cache = {};
  arguments.cos_cache = read({64, 4});
  arguments.sin_cache = read({64, 4});
  arguments.output = {results.data(), ElementType::kFloat32, {kTokens, kHeads * 8}};
}

Problem ValidCall::problem() const {
  Problem problem;
  const Status status = validate(arguments, attributes, problem);
  EXPECT_TRUE(status.ok()) << status.message();
  return problem;
}

void ValidCall::widen_indices() {
  wide.assign(table.begin(), table.end());
  wide.insert(wide.end(), slots.begin(), slots.end());
  arguments.block_table = {wide.data(), ElementType::kInt64, {kBatch, kColumns}};
  if (arguments.slot_mapping.present()) {
    arguments.slot_mapping = {wide.data() + table.size(), ElementType::kInt64, {kTokens}};
  }
}

}  // namespace octavo::test
