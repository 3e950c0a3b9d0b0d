// Rules M: which tensors and attributes go together.
#include <utility>

#include "contract/message.h"
#include "contract/rules.h"
#include "contract/tensors.h"

namespace octavo::contract {
namespace {

bool is_latent(const Call& call) {
  return call.attributes.kv_cache_layout == CacheLayout::kLatent;
}

const char* presence(const TensorView& view) {
  return view.present() ? "present" : "absent";
}

std::string required(const Call& call) {
  using enum TensorId;
  for (const TensorId id : {kQuery, kKeyCache, kCumulativeSequenceLength, kPastSeqlens, kBlockTable, kOutput}) {
    if (tensor(id).view(call.arguments).present()) continue;
    return cat(tensor(id).name, ": required, but absent; pass a tensor of shape ", tensor(id).dimensions);
  }
  return {};
}

std::string packed_or_separate(const Call& call) {
  const auto& [key, value] = std::pair(call.arguments.key, call.arguments.value);
  if (is_latent(call) || key.present() == value.present()) return {};
  return cat("key, value: SEPARATE takes both, or neither when query holds packed Q, K and V; got key ", presence(key),
             " and value ", presence(value), "; pass both, or set kv_cache_layout to LATENT for MLA");
}

std::string separate_value_cache(const Call& call) {
  if (is_latent(call) || call.arguments.value_cache.present()) return {};
  return "value_cache: required in SEPARATE, but absent; pass it, or set kv_cache_layout to LATENT for MLA";
}

std::string latent_key(const Call& call) {
  if (!is_latent(call) || call.arguments.key.present()) return {};
  return "key: required in LATENT, where it holds the new latent rows, but absent; pass a tensor of shape "
         "(token_count, kv_num_heads*head_size)";
}

std::string latent_no_value(const Call& call) {
  if (!is_latent(call)) return {};
  for (const TensorId id : {TensorId::kValue, TensorId::kValueCache}) {
    if (!tensor(id).view(call.arguments).present()) continue;
    return cat(tensor(id).name,
               ": must be absent in LATENT, where V is the leading v_head_size channels of key_cache; "
               "got one; leave it out");
  }
  return {};
}

std::string latent_no_sink_no_norm(const Call& call) {
  if (!is_latent(call)) return {};
  for (const TensorId id : {TensorId::kHeadSink, TensorId::kQNormWeight, TensorId::kKNormWeight}) {
    if (!tensor(id).view(call.arguments).present()) continue;
    return cat(tensor(id).name, ": not defined in LATENT, but got one; leave it out");
  }
  return {};
}

std::string latent_no_v_quant(const Call& call) {
  if (!is_latent(call)) return {};
  const char* name = call.arguments.v_scale.present()                          ? "v_scale"
                     : call.attributes.v_quant_type != QuantType::kNone        ? "v_quant_type"
                     : call.attributes.v_cache_dtype != CacheType::kTensorType ? "v_cache_dtype"
                                                                               : nullptr;
  if (name == nullptr) return {};
  return cat(name,
             ": must be unset in LATENT, where one cache holds K and V and k_quant_type, k_cache_dtype and k_scale "
             "describe it; got a value; leave it out");
}

std::string rotary_pair(const Call& call) {
  const auto& [cos, sin] = std::pair(call.arguments.cos_cache, call.arguments.sin_cache);
  if (cos.present() == sin.present()) return {};
  return cat("cos_cache, sin_cache: both or neither; got cos_cache ", presence(cos), " and sin_cache ", presence(sin),
             "; pass both, or leave both out");
}

std::string rotary_needs_caches(const Call& call) {
  if (call.attributes.do_rotary == 0 || call.arguments.cos_cache.present()) return {};
  return "cos_cache, sin_cache: required with do_rotary = 1, but absent; pass (max_seq_len, rotary_dim/2) each, or set "
         "do_rotary to 0";
}

std::string norm_pair(const Call& call) {
  const auto& [q_norm, k_norm] = std::pair(call.arguments.q_norm_weight, call.arguments.k_norm_weight);
  if (q_norm.present() == k_norm.present()) return {};
  return cat("q_norm_weight, k_norm_weight: both or neither; got q_norm_weight ", presence(q_norm),
             " and k_norm_weight ", presence(k_norm), "; pass both, or leave both out");
}

std::string scale_with_quant(const char* scale_name, const TensorView& scale, const char* quant_name, QuantType quant) {
  if (scale.present() == (quant != QuantType::kNone)) return {};
  return cat(scale_name, ": present exactly when ", quant_name, " is not NONE; got ", scale_name, " ", presence(scale),
             " with ", quant_name, " = ", name(quant), "; change one of the two");
}

std::string k_scale_with_quant(const Call& call) {
  return scale_with_quant("k_scale", call.arguments.k_scale, "k_quant_type", call.attributes.k_quant_type);
}

std::string v_scale_with_quant(const Call& call) {
  return scale_with_quant("v_scale", call.arguments.v_scale, "v_quant_type", call.attributes.v_quant_type);
}

std::string output_qk_requested(const Call& call) {
  const bool requested = call.attributes.qk_output != 0;
  if (call.arguments.output_qk.present() == requested) return {};
  return cat("output_qk: present exactly when qk_output is not 0; got output_qk ", presence(call.arguments.output_qk),
             " with qk_output = ", call.attributes.qk_output, "; change one of the two");
}

constexpr Rule kRules[] = {
    {"M1", "query, key_cache, cumulative_sequence_length, past_seqlens, block_table and output are present.", required},
    {"M2", "SEPARATE: key and value are both present, or both absent (query is packed QKV).", packed_or_separate},
    {"M3", "SEPARATE: value_cache is present.", separate_value_cache},
    {"M4", "LATENT: key is present.", latent_key},
    {"M5", "LATENT: value and value_cache are absent.", latent_no_value},
    {"M6", "LATENT: head_sink, q_norm_weight and k_norm_weight are absent.", latent_no_sink_no_norm},
    {"M7", "LATENT: v_scale is absent, v_quant_type is NONE and v_cache_dtype is empty.", latent_no_v_quant},
    {"M8", "cos_cache and sin_cache are both present or both absent.", rotary_pair},
    {"M9", "do_rotary = 1 needs cos_cache and sin_cache.", rotary_needs_caches},
    {"M10", "q_norm_weight and k_norm_weight are both present or both absent.", norm_pair},
    {"M11", "k_scale is present exactly when k_quant_type is not NONE.", k_scale_with_quant},
    {"M12", "v_scale is present exactly when v_quant_type is not NONE.", v_scale_with_quant},
    {"M13", "output_qk is present exactly when qk_output is not 0.", output_qk_requested},
};

}  // namespace

std::span<const Rule> mode_rules() noexcept {
  return kRules;
}

}  // namespace octavo::contract
