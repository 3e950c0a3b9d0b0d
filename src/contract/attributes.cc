// Rules A: the attributes by themselves.
#include <cmath>
#include <utility>

#include "contract/message.h"
#include "contract/rules.h"

namespace octavo::contract {
namespace {

// Keeps every product of a head count and a size inside 64 bits; no model is within a factor of a thousand of it.
constexpr std::int64_t kMaxHeads = std::int64_t{1} << 20;

std::string flag(const char* name, std::int64_t value, const char* meaning) {
  if (value == 0 || value == 1) return {};
  return cat(name, ": must be 0 or 1, got ", value, "; ", meaning);
}

std::string num_heads(const Call& call) {
  const std::int64_t heads = call.attributes.num_heads;
  if (heads >= 1 && heads <= kMaxHeads) return {};
  return cat("num_heads: must be 1 to ", kMaxHeads, ", got ", heads, "; set it to the model's number of query heads");
}

std::string kv_num_heads(const Call& call) {
  const auto& [heads, kv_heads] = std::pair(call.attributes.num_heads, call.attributes.kv_num_heads);
  if (kv_heads >= 1 && kv_heads <= heads && heads % kv_heads == 0) return {};
  return cat("kv_num_heads: must be at least 1 and divide num_heads = ", heads, ", got ", kv_heads,
             "; set it to the model's number of key/value heads");
}

std::string scale(const Call& call) {
  if (std::isfinite(call.attributes.scale)) return {};
  return cat("scale: must be finite, got ", call.attributes.scale, "; 0 means 1/sqrt(head_size)");
}

std::string softcap(const Call& call) {
  if (std::isfinite(call.attributes.softcap) && call.attributes.softcap >= 0) return {};
  return cat("softcap: must be finite and not negative, got ", call.attributes.softcap, "; 0 turns it off");
}

std::string local_window_size(const Call& call) {
  const std::int64_t window = call.attributes.local_window_size;
  if (window == -1 || window >= 1) return {};
  return cat("local_window_size: must be -1 (no window) or at least 1, got ", window,
             "; W sees the current position and the W - 1 before it");
}

std::string is_causal(const Call& call) {
  return flag("is_causal", call.attributes.is_causal, "0 lets every query see its whole sequence");
}

std::string window_is_causal(const Call& call) {
  if (call.attributes.local_window_size == -1 || call.attributes.is_causal == 1) return {};
  return cat("local_window_size: needs is_causal = 1, got a window of ", call.attributes.local_window_size,
             " with is_causal = 0; a window only extends to the left, so drop one of the two");
}

std::string do_rotary(const Call& call) {
  return flag("do_rotary", call.attributes.do_rotary, "1 rotates Q and K by cos_cache and sin_cache");
}

std::string rotary_interleaved(const Call& call) {
  return flag("rotary_interleaved", call.attributes.rotary_interleaved, "1 rotates channel pairs (2i, 2i+1)");
}

std::string rotary_offset(const Call& call) {
  const std::int64_t offset = call.attributes.rotary_offset;
  if (offset >= 0 && offset % 8 == 0) return {};
  return cat("rotary_offset: must be a multiple of 8 and not negative, got ", offset,
             "; it is the first rotated channel of a head");
}

std::string qk_norm_epsilon(const Call& call) {
  const float epsilon = call.attributes.qk_norm_epsilon;
  if (std::isfinite(epsilon) && epsilon > 0) return {};
  return cat("qk_norm_epsilon: must be finite and above 0, got ", epsilon, "; 1e-06 is the default");
}

std::string quant_types(const Call& call) {
  for (const auto& [name, type] : {std::pair("k_quant_type", call.attributes.k_quant_type),
                                   std::pair("v_quant_type", call.attributes.v_quant_type)}) {
    if (type > QuantType::kPerChannel) {
      return cat(name, ": must be NONE, PER_TENSOR or PER_CHANNEL, got enumerator ", static_cast<int>(type),
                 "; use one of QuantType");
    }
  }
  return {};
}

std::string cache_dtypes(const Call& call) {
  for (const auto& [name, type] : {std::pair("k_cache_dtype", call.attributes.k_cache_dtype),
                                   std::pair("v_cache_dtype", call.attributes.v_cache_dtype)}) {
    if (type > CacheType::kFloat4E2M1) {
      return cat(name,
                 ": must be empty, float32, float16, bfloat16, int8, float8e4m3fn, int4 or float4e2m1, got enumerator ",
                 static_cast<int>(type), "; use one of CacheType");
    }
  }
  return {};
}

std::string kv_cache_layout(const Call& call) {
  if (call.attributes.kv_cache_layout <= CacheLayout::kLatent) return {};
  return cat("kv_cache_layout: must be SEPARATE or LATENT, got enumerator ",
             static_cast<int>(call.attributes.kv_cache_layout), "; use one of CacheLayout");
}

std::string v_head_size(const Call& call) {
  if (call.attributes.v_head_size >= 0) return {};
  return cat("v_head_size: must not be negative, got ", call.attributes.v_head_size, "; 0 means head_size");
}

std::string qk_output(const Call& call) {
  const std::int64_t kind = call.attributes.qk_output;
  if (kind >= 0 && kind <= 2) return {};
  return cat("qk_output: must be 0 (none), 1 (scores) or 2 (probabilities), got ", kind, "; 0 needs no output_qk");
}

constexpr Rule kRules[] = {
    {"A1", "num_heads is 1 to 1048576.", num_heads},
    {"A2", "kv_num_heads is at least 1 and divides num_heads.", kv_num_heads},
    {"A3", "scale is finite.", scale},
    {"A4", "softcap is finite and not negative.", softcap},
    {"A5", "local_window_size is -1 or at least 1.", local_window_size},
    {"A6", "is_causal is 0 or 1.", is_causal},
    {"A7", "A local_window_size other than -1 needs is_causal = 1.", window_is_causal},
    {"A8", "do_rotary is 0 or 1.", do_rotary},
    {"A9", "rotary_interleaved is 0 or 1.", rotary_interleaved},
    {"A10", "rotary_offset is a multiple of 8 and not negative.", rotary_offset},
    {"A11", "qk_norm_epsilon is finite and above 0.", qk_norm_epsilon},
    {"A12", "k_quant_type and v_quant_type are NONE, PER_TENSOR or PER_CHANNEL.", quant_types},
    {"A13",
     "k_cache_dtype and v_cache_dtype are empty, float32, float16, bfloat16, int8, float8e4m3fn, int4 or float4e2m1.",
     cache_dtypes},
    {"A14", "kv_cache_layout is SEPARATE or LATENT.", kv_cache_layout},
    {"A15", "v_head_size is not negative.", v_head_size},
    {"A16", "qk_output is 0, 1 or 2.", qk_output},
};

}  // namespace

std::span<const Rule> attribute_rules() noexcept {
  return kRules;
}

}  // namespace octavo::contract
