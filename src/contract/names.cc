// The spelling of every enumerator, as the operator's schema, messages and tools write it.
#include "octavo/problem.h"

namespace octavo {

const char* name(ElementType type) noexcept {
  switch (type) {
    case ElementType::kUndefined: return "undefined";
    case ElementType::kFloat32: return "float32";
    case ElementType::kFloat16: return "float16";
    case ElementType::kBFloat16: return "bfloat16";
    case ElementType::kFloat8E4M3FN: return "float8e4m3fn";
    case ElementType::kInt8: return "int8";
    case ElementType::kUint8: return "uint8";
    case ElementType::kInt32: return "int32";
    case ElementType::kInt64: return "int64";
  }
  return "unknown";
}

const char* name(QuantType type) noexcept {
  switch (type) {
    case QuantType::kNone: return "NONE";
    case QuantType::kPerTensor: return "PER_TENSOR";
    case QuantType::kPerChannel: return "PER_CHANNEL";
  }
  return "unknown";
}

const char* name(CacheType type) noexcept {
  switch (type) {
    case CacheType::kTensorType: return "";
    case CacheType::kFloat32: return "float32";
    case CacheType::kFloat16: return "float16";
    case CacheType::kBFloat16: return "bfloat16";
    case CacheType::kInt8: return "int8";
    case CacheType::kFloat8E4M3FN: return "float8e4m3fn";
    case CacheType::kInt4: return "int4";
    case CacheType::kFloat4E2M1: return "float4e2m1";
  }
  return "unknown";
}

const char* name(CacheLayout layout) noexcept {
  switch (layout) {
    case CacheLayout::kSeparate: return "SEPARATE";
    case CacheLayout::kLatent: return "LATENT";
  }
  return "unknown";
}

const char* name(Feature feature) noexcept {
  switch (feature) {
    case Feature::kPackedQkv: return "packed_qkv";
    case Feature::kSlotMapping: return "slot_mapping";
    case Feature::kRope: return "rope";
    case Feature::kQkNorm: return "qk_norm";
    case Feature::kHeadSink: return "head_sink";
    case Feature::kSoftcap: return "softcap";
    case Feature::kLocalWindow: return "local_window";
    case Feature::kNonCausal: return "non_causal";
    case Feature::kAttentionBias: return "attention_bias";
    case Feature::kQueryPositions: return "query_positions";
    case Feature::kOutputQk: return "output_qk";
    case Feature::kLse: return "lse";
    case Feature::kLatent: return "latent";
    case Feature::kQuantizedCache: return "quantized_cache";
    case Feature::kPerChannelScale: return "per_channel_scale";
    case Feature::kFourBitCache: return "four_bit_cache";
    case Feature::kStridedCache: return "strided_cache";
    case Feature::kInt64Indices: return "int64_indices";
    case Feature::kSmallBlocks: return "small_blocks";
  }
  return "unknown";
}

std::string to_string(FeatureSet features) {
  std::string text;
  for (int bit = 0; bit < kFeatureCount; ++bit) {
    const Feature feature{1u << bit};
    if (!features.contains(feature)) continue;
    if (!text.empty()) text += ", ";
    text += name(feature);
  }
  return text.empty() ? "none" : text;
}

}  // namespace octavo
