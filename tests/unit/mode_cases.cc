#include "rule_cases.h"

namespace octavo::test {

std::vector<RuleCase> mode_cases() {
  using enum ValidCall::Base;
  return {
      {"M1", kPlain, [](ValidCall& c) { c.arguments.query = {}; },
       "query: required, but absent; pass a tensor of shape (token_count, num_heads*head_size), or (token_count, "
       "(num_heads + 2*kv_num_heads)*head_size) when packed"},
      {"M1", kPlain, [](ValidCall& c) { c.arguments.key_cache = {}; },
       "key_cache: required, but absent; pass a tensor of shape (num_blocks, block_size, kv_num_heads, head_size or "
       "head_size/2 bytes for a 4-bit cache)"},
      {"M1", kPlain, [](ValidCall& c) { c.arguments.cumulative_sequence_length = {}; },
       "cumulative_sequence_length: required, but absent; pass a tensor of shape (batch_size + 1)"},
      {"M1", kPlain, [](ValidCall& c) { c.arguments.past_seqlens = {}; },
       "past_seqlens: required, but absent; pass a tensor of shape (batch_size)"},
      {"M1", kPlain, [](ValidCall& c) { c.arguments.block_table = {}; },
       "block_table: required, but absent; pass a tensor of shape (batch_size, max_blocks_per_sequence)"},
      {"M1", kPlain, [](ValidCall& c) { c.arguments.output = {}; },
       "output: required, but absent; pass a tensor of shape (token_count, num_heads*v_head_size), v_head_size 0 "
       "meaning head_size"},
      {"M2", kPlain, [](ValidCall& c) { c.arguments.value = {}; },
       "key, value: SEPARATE takes both, or neither when query holds packed Q, K and V; got key present and value "
       "absent; pass both, or set kv_cache_layout to LATENT for MLA"},
      {"M2", kPlain, [](ValidCall& c) { c.arguments.key = {}; },
       "key, value: SEPARATE takes both, or neither when query holds packed Q, K and V; got key absent and value "
       "present; pass both, or set kv_cache_layout to LATENT for MLA"},
      {"M3", kPlain, [](ValidCall& c) { c.arguments.value_cache = {}; },
       "value_cache: required in SEPARATE, but absent; pass it, or set kv_cache_layout to LATENT for MLA"},
      {"M4", kLatent, [](ValidCall& c) { c.arguments.key = {}; },
       "key: required in LATENT, where it holds the new latent rows, but absent; pass a tensor of shape (token_count, "
       "kv_num_heads*head_size)"},
      {"M5", kLatent, [](ValidCall& c) { c.arguments.value = c.arguments.key; },
       "value: must be absent in LATENT, where V is the leading v_head_size channels of key_cache; got one; leave it "
       "out"},
      {"M5", kLatent, [](ValidCall& c) { c.arguments.value_cache = c.arguments.key_cache; },
       "value_cache: must be absent in LATENT, where V is the leading v_head_size channels of key_cache; got one; "
       "leave it out"},
      {"M6", kLatent,
       [](ValidCall& c) {
         c.arguments.head_sink = {c.floats.data(), ElementType::kFloat32, {ValidCall::kHeads}};
       },
       "head_sink: not defined in LATENT, but got one; leave it out"},
      {"M6", kLatent,
       [](ValidCall& c) {
         c.arguments.q_norm_weight = {c.floats.data(), ElementType::kFloat32, {ValidCall::kHeadSize}};
         c.arguments.k_norm_weight = c.arguments.q_norm_weight;
       },
       "q_norm_weight: not defined in LATENT, but got one; leave it out"},
      {"M7", kLatent,
       [](ValidCall& c) {
         c.arguments.v_scale = {c.scales.data(), ElementType::kFloat32, {1}};
       },
       "v_scale: must be unset in LATENT, where one cache holds K and V and k_quant_type, k_cache_dtype and k_scale "
       "describe it; got a value; leave it out"},
      {"M7", kLatent, [](ValidCall& c) { c.attributes.v_quant_type = QuantType::kPerTensor; },
       "v_quant_type: must be unset in LATENT, where one cache holds K and V and k_quant_type, k_cache_dtype and "
       "k_scale describe it; got a value; leave it out"},
      {"M7", kLatent, [](ValidCall& c) { c.attributes.v_cache_dtype = CacheType::kFloat32; },
       "v_cache_dtype: must be unset in LATENT, where one cache holds K and V and k_quant_type, k_cache_dtype and "
       "k_scale describe it; got a value; leave it out"},
      {"M8", kFull, [](ValidCall& c) { c.arguments.sin_cache = {}; },
       "cos_cache, sin_cache: both or neither; got cos_cache present and sin_cache absent; pass "
       "both, or leave both out"},
      {"M9", kPlain, [](ValidCall& c) { c.attributes.do_rotary = 1; },
       "cos_cache, sin_cache: required with do_rotary = 1, but absent; pass (max_seq_len, rotary_dim/2) each, or set "
       "do_rotary to 0"},
      {"M10", kFull, [](ValidCall& c) { c.arguments.k_norm_weight = {}; },
       "q_norm_weight, k_norm_weight: both or neither; got q_norm_weight present and k_norm_weight absent; "
       "pass both, or leave both out"},
      {"M11", kQuantized, [](ValidCall& c) { c.arguments.k_scale = {}; },
       "k_scale: present exactly when k_quant_type is not NONE; got k_scale absent with k_quant_type = PER_CHANNEL; "
       "change one of the two"},
      {"M11", kPlain,
       [](ValidCall& c) {
         c.arguments.k_scale = {c.scales.data(), ElementType::kFloat32, {1}};
       },
       "k_scale: present exactly when k_quant_type is not NONE; got k_scale present with k_quant_type = NONE; change "
       "one of the two"},
      {"M12", kQuantized, [](ValidCall& c) { c.arguments.v_scale = {}; },
       "v_scale: present exactly when v_quant_type is not NONE; got v_scale absent with v_quant_type = PER_TENSOR; "
       "change one of the two"},
      {"M13", kFull, [](ValidCall& c) { c.arguments.output_qk = {}; },
       "output_qk: present exactly when qk_output is not 0; got output_qk absent with qk_output = 1; change one of the "
       "two"},
      {"M13", kFull, [](ValidCall& c) { c.attributes.qk_output = 0; },
       "output_qk: present exactly when qk_output is not 0; got output_qk present with qk_output = 0; change one of "
       "the two"},
  };
}

}  // namespace octavo::test
