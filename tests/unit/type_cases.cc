#include "rule_cases.h"

namespace octavo::test {
namespace {

using enum ElementType;

template <auto Member, ElementType type>
void set_type(ValidCall& call) {
  (call.arguments.*Member).type = type;
}

// float16 everywhere that T is meant.
void make_float16(ValidCall& call) {
  Arguments& a = call.arguments;
  a.query.type = a.key.type = a.value.type = a.output.type = kFloat16;
  a.key_cache.type = a.value_cache.type = kFloat16;
}

}  // namespace

std::vector<RuleCase> type_cases() {
  using enum ValidCall::Base;
  return {
      {"T1", kPlain, set_type<&Arguments::query, kInt32>,
       "query: type must be float32, float16 or bfloat16, got int32; it is the T that the other tensors share"},
      {"T2", kPlain, set_type<&Arguments::key, kFloat16>,
       "key: type must be float32, as query's, got float16; cast it"},
      {"T2", kPlain, set_type<&Arguments::value, kBFloat16>,
       "value: type must be float32, as query's, got bfloat16; cast it"},
      {"T2", kFull, set_type<&Arguments::cos_cache, kFloat16>,
       "cos_cache: type must be float32, as query's, got float16; cast it"},
      {"T2", kFull, set_type<&Arguments::sin_cache, kFloat16>,
       "sin_cache: type must be float32, as query's, got float16; cast it"},
      {"T2", kFull, set_type<&Arguments::head_sink, kFloat16>,
       "head_sink: type must be float32, as query's, got float16; cast it"},
      {"T2", kFull, set_type<&Arguments::q_norm_weight, kFloat16>,
       "q_norm_weight: type must be float32, as query's, got float16; cast it"},
      {"T2", kFull, set_type<&Arguments::k_norm_weight, kFloat16>,
       "k_norm_weight: type must be float32, as query's, got float16; cast it"},
      {"T2", kFull, set_type<&Arguments::attention_bias, kFloat16>,
       "attention_bias: type must be float32, as query's, got float16; cast it"},
      {"T2", kPlain, set_type<&Arguments::output, kFloat16>,
       "output: type must be float32, as query's, got float16; cast it"},
      {"T3", kPlain,
       [](ValidCall& c) {
         c.wide = {0, 3, 5};
         c.arguments.cumulative_sequence_length = {c.wide.data(), kInt64, {3}};
       },
       "cumulative_sequence_length: type must be int32, got int64; cast it"},
      {"T3", kPlain, set_type<&Arguments::past_seqlens, kFloat32>,
       "past_seqlens: type must be int32, got float32; cast it"},
      {"T3", kFull, set_type<&Arguments::attention_metadata, kUint8>,
       "attention_metadata: type must be int32, got uint8; cast it"},
      {"T3", kFull, set_type<&Arguments::query_positions, kFloat32>,
       "query_positions: type must be int32, got float32; cast it"},
      {"T4", kPlain, set_type<&Arguments::block_table, kFloat32>,
       "block_table: type must be int32 or int64, got float32; cast it"},
      {"T5", kFull,
       [](ValidCall& c) {
         const TensorView narrow = c.arguments.slot_mapping;
         c.widen_indices();
         c.arguments.slot_mapping = narrow;
       },
       "slot_mapping: type must be int64, as block_table's, got int32; cast it"},
      {"T6", kQuantized, set_type<&Arguments::k_scale, kFloat16>,
       "k_scale: type must be float32, got float16; cast it"},
      {"T6", kQuantized, set_type<&Arguments::v_scale, kBFloat16>,
       "v_scale: type must be float32, got bfloat16; cast it"},
      {"T6", kFull, set_type<&Arguments::lse, kFloat16>, "lse: type must be float32, got float16; cast it"},
      {"T7", kFull, set_type<&Arguments::output_qk, kInt8>,
       "output_qk: type must be float32, float16 or bfloat16, got int8; allocate one of them"},
      {"T8", kPlain, set_type<&Arguments::key_cache, kInt32>,
       "key_cache: under float32 queries a cache is float32, float16, bfloat16, int8, float8e4m3fn or uint8 (4-bit), "
       "got int32; allocate the cache in one of these types"},
      {"T8", kPlain,
       [](ValidCall& c) {
         make_float16(c);
         c.arguments.value_cache.type = kBFloat16;
       },
       "value_cache: under float16 queries a cache is float16, int8, float8e4m3fn or uint8 (4-bit), got bfloat16; "
       "allocate the cache in one of these types"},
      {"T9", kQuantized, [](ValidCall& c) { c.attributes.v_cache_dtype = CacheType::kTensorType; },
       "v_cache_dtype: must be int4 or float4e2m1, because value_cache is uint8; got ''; say what the 4-bit codes "
       "mean"},
      {"T9", kQuantized, [](ValidCall& c) { c.attributes.k_cache_dtype = CacheType::kInt4; },
       "k_cache_dtype: must be empty or name the type of key_cache, int8; got 'int4'; leave it out, or pass a cache of "
       "that type"},
      {"T9", kPlain, [](ValidCall& c) { c.attributes.v_cache_dtype = CacheType::kFloat16; },
       "v_cache_dtype: must be empty or name the type of value_cache, float32; got 'float16'; leave it out, or pass a "
       "cache of that type"},
      {"T10", kQuantized,
       [](ValidCall& c) {
         c.attributes.k_quant_type = QuantType::kNone;
         c.arguments.k_scale = {};
       },
       "k_quant_type: must be PER_TENSOR or PER_CHANNEL, because key_cache is int8; got NONE; set it and pass the "
       "scale"},
      {"T10", kPlain,
       [](ValidCall& c) {
         c.attributes.v_quant_type = QuantType::kPerTensor;
         c.arguments.v_scale = {c.scales.data(), kFloat32, {1}};
       },
       "v_quant_type: must be NONE, because value_cache is float32; got PER_TENSOR; pass an int8, float8e4m3fn or "
       "uint8 cache to quantize"},
  };
}

}  // namespace octavo::test
