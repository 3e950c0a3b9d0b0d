#include <limits>

#include "rule_cases.h"

namespace octavo::test {
namespace {
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
}  // namespace

std::vector<RuleCase> attribute_cases() {
  using enum ValidCall::Base;
  return {
      {"A1", kPlain, [](ValidCall& c) { c.attributes.num_heads = 0; },
       "num_heads: must be 1 to 1048576, got 0; set it to the model's number of query heads"},
      {"A1", kPlain, [](ValidCall& c) { c.attributes.num_heads = std::numeric_limits<std::int64_t>::max(); },
       "num_heads: must be 1 to 1048576, got 9223372036854775807; set it to the model's number of query heads"},
      {"A2", kPlain, [](ValidCall& c) { c.attributes.kv_num_heads = 3; },
       "kv_num_heads: must be at least 1 and divide num_heads = 4, got 3; set it to the model's number of key/value "
       "heads"},
      {"A2", kPlain, [](ValidCall& c) { c.attributes.kv_num_heads = -2; },
       "kv_num_heads: must be at least 1 and divide num_heads = 4, got -2; set it to the model's number of key/value "
       "heads"},
      {"A3", kPlain, [](ValidCall& c) { c.attributes.scale = kNan; },
       "scale: must be finite, got nan; 0 means 1/sqrt(head_size)"},
      {"A4", kPlain, [](ValidCall& c) { c.attributes.softcap = -1.5f; },
       "softcap: must be finite and not negative, got -1.5; 0 turns it off"},
      {"A4", kPlain, [](ValidCall& c) { c.attributes.softcap = kInfinity; },
       "softcap: must be finite and not negative, got inf; 0 turns it off"},
      {"A5", kPlain, [](ValidCall& c) { c.attributes.local_window_size = 0; },
       "local_window_size: must be -1 (no window) or at least 1, got 0; W sees the current position and the W - 1 "
       "before it"},
      {"A6", kPlain, [](ValidCall& c) { c.attributes.is_causal = 2; },
       "is_causal: must be 0 or 1, got 2; 0 lets every query see its whole sequence"},
      {"A7", kFull, [](ValidCall& c) { c.attributes.is_causal = 0; },
       "local_window_size: needs is_causal = 1, got a window of 20 with is_causal = 0; a window only extends to the "
       "left, so drop one of the two"},
      {"A8", kFull, [](ValidCall& c) { c.attributes.do_rotary = -1; },
       "do_rotary: must be 0 or 1, got -1; 1 rotates Q and K by cos_cache and sin_cache"},
      {"A9", kPlain, [](ValidCall& c) { c.attributes.rotary_interleaved = 3; },
       "rotary_interleaved: must be 0 or 1, got 3; 1 rotates channel pairs (2i, 2i+1)"},
      {"A10", kLatent, [](ValidCall& c) { c.attributes.rotary_offset = 4; },
       "rotary_offset: must be a multiple of 8 and not negative, got 4; it is the first rotated channel of a head"},
      {"A10", kLatent, [](ValidCall& c) { c.attributes.rotary_offset = -8; },
       "rotary_offset: must be a multiple of 8 and not negative, got -8; it is the first rotated channel of a head"},
      {"A11", kPlain, [](ValidCall& c) { c.attributes.qk_norm_epsilon = 0.0f; },
       "qk_norm_epsilon: must be finite and above 0, got 0; 1e-06 is the default"},
      {"A11", kPlain, [](ValidCall& c) { c.attributes.qk_norm_epsilon = kNan; },
       "qk_norm_epsilon: must be finite and above 0, got nan; 1e-06 is the default"},
      {"A12", kPlain, [](ValidCall& c) { c.attributes.k_quant_type = static_cast<QuantType>(9); },
       "k_quant_type: must be NONE, PER_TENSOR or PER_CHANNEL, got enumerator 9; use one of QuantType"},
      {"A12", kPlain, [](ValidCall& c) { c.attributes.v_quant_type = static_cast<QuantType>(3); },
       "v_quant_type: must be NONE, PER_TENSOR or PER_CHANNEL, got enumerator 3; use one of QuantType"},
      {"A13", kPlain, [](ValidCall& c) { c.attributes.k_cache_dtype = static_cast<CacheType>(200); },
       "k_cache_dtype: must be empty, float32, float16, bfloat16, int8, float8e4m3fn, int4 or float4e2m1, got "
       "enumerator 200; use one of CacheType"},
      {"A13", kPlain, [](ValidCall& c) { c.attributes.v_cache_dtype = static_cast<CacheType>(8); },
       "v_cache_dtype: must be empty, float32, float16, bfloat16, int8, float8e4m3fn, int4 or float4e2m1, got "
       "enumerator 8; use one of CacheType"},
      {"A14", kPlain, [](ValidCall& c) { c.attributes.kv_cache_layout = static_cast<CacheLayout>(2); },
       "kv_cache_layout: must be SEPARATE or LATENT, got enumerator 2; use one of CacheLayout"},
      {"A15", kLatent, [](ValidCall& c) { c.attributes.v_head_size = -8; },
       "v_head_size: must not be negative, got -8; 0 means head_size"},
      {"A16", kPlain, [](ValidCall& c) { c.attributes.qk_output = 3; },
       "qk_output: must be 0 (none), 1 (scores) or 2 (probabilities), got 3; 0 needs no output_qk"},
  };
}

}  // namespace octavo::test
