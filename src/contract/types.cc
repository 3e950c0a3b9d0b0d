// Rules T: element types, and how the caches are stored.
#include <utility>

#include "contract/message.h"
#include "contract/rules.h"
#include "contract/tensors.h"

namespace octavo::contract {
namespace {

using enum ElementType;

bool is_float(ElementType type) {
  return type == kFloat32 || type == kFloat16 || type == kBFloat16;
}
bool is_quantized(ElementType storage) {
  return storage == kInt8 || storage == kFloat8E4M3FN || storage == kUint8;
}

CacheType own_type(ElementType storage) {
  switch (storage) {
    case kFloat32: return CacheType::kFloat32;
    case kFloat16: return CacheType::kFloat16;
    case kBFloat16: return CacheType::kBFloat16;
    case kInt8: return CacheType::kInt8;
    case kFloat8E4M3FN: return CacheType::kFloat8E4M3FN;
    default: return CacheType::kTensorType;
  }
}

struct Cache {
  const char* name;
  ElementType storage;
  const char* dtype_name;
  CacheType dtype;
  const char* quant_name;
  QuantType quant;
};

Cache k_cache(const Call& call) {
  return {"key_cache",    call.arguments.key_cache.type, "k_cache_dtype", call.attributes.k_cache_dtype,
          "k_quant_type", call.attributes.k_quant_type};
}

Cache v_cache(const Call& call) {
  return {"value_cache",  call.arguments.value_cache.type, "v_cache_dtype", call.attributes.v_cache_dtype,
          "v_quant_type", call.attributes.v_quant_type};
}

std::string query_type(const Call& call) {
  if (is_float(call.arguments.query.type)) return {};
  return cat("query: type must be float32, float16 or bfloat16, got ", name(call.arguments.query.type),
             "; it is the T that the other tensors share");
}

std::string type_is(const Call& call, std::initializer_list<TensorId> ids, ElementType type, const char* why) {
  for (const TensorId id : ids) {
    const TensorView view = tensor(id).view(call.arguments);
    if (!view.present() || view.type == type) continue;
    return cat(tensor(id).name, ": type must be ", name(type), why, ", got ", name(view.type), "; cast it");
  }
  return {};
}

std::string same_as_query(const Call& call) {
  using enum TensorId;
  return type_is(call,
                 {kKey, kValue, kCosCache, kSinCache, kHeadSink, kQNormWeight, kKNormWeight, kAttentionBias, kOutput},
                 call.arguments.query.type, ", as query's");
}

std::string int32_tensors(const Call& call) {
  using enum TensorId;
  return type_is(call, {kCumulativeSequenceLength, kPastSeqlens, kAttentionMetadata, kQueryPositions}, kInt32, "");
}

std::string block_table_type(const Call& call) {
  const ElementType type = call.arguments.block_table.type;
  if (type == kInt32 || type == kInt64) return {};
  return cat("block_table: type must be int32 or int64, got ", name(type), "; cast it");
}

std::string slot_mapping_type(const Call& call) {
  return type_is(call, {TensorId::kSlotMapping}, call.arguments.block_table.type, ", as block_table's");
}

std::string float32_tensors(const Call& call) {
  using enum TensorId;
  return type_is(call, {kKScale, kVScale, kLse}, kFloat32, "");
}

std::string output_qk_type(const Call& call) {
  const TensorView& scores = call.arguments.output_qk;
  if (!scores.present() || is_float(scores.type)) return {};
  return cat("output_qk: type must be float32, float16 or bfloat16, got ", name(scores.type), "; allocate one of them");
}

std::string storage(const Cache& cache, ElementType query_type) {
  if (cache.storage == query_type || is_quantized(cache.storage)) return {};
  if (query_type == kFloat32 && is_float(cache.storage)) return {};
  return cat(cache.name, ": under ", name(query_type), " queries a cache is ",
             query_type == kFloat32 ? "float32, float16, bfloat16" : name(query_type),
             ", int8, float8e4m3fn or uint8 (4-bit), got ", name(cache.storage),
             "; allocate the cache in one of these types");
}

std::string dtype(const Cache& cache) {
  if (cache.storage == kUint8) {
    if (cache.dtype == CacheType::kInt4 || cache.dtype == CacheType::kFloat4E2M1) return {};
    return cat(cache.dtype_name, ": must be int4 or float4e2m1, because ", cache.name, " is uint8; got '",
               name(cache.dtype), "'; say what the 4-bit codes mean");
  }
  if (cache.dtype == CacheType::kTensorType || cache.dtype == own_type(cache.storage)) return {};
  return cat(cache.dtype_name, ": must be empty or name the type of ", cache.name, ", ", name(cache.storage), "; got '",
             name(cache.dtype), "'; leave it out, or pass a cache of that type");
}

std::string quant(const Cache& cache) {
  if (is_quantized(cache.storage) == (cache.quant != QuantType::kNone)) return {};
  if (is_quantized(cache.storage)) {
    return cat(cache.quant_name, ": must be PER_TENSOR or PER_CHANNEL, because ", cache.name, " is ",
               name(cache.storage), "; got NONE; set it and pass the scale");
  }
  return cat(cache.quant_name, ": must be NONE, because ", cache.name, " is ", name(cache.storage), "; got ",
             name(cache.quant), "; pass an int8, float8e4m3fn or uint8 cache to quantize");
}

template <auto check>
std::string both_caches(const Call& call) {
  if (std::string text = check(k_cache(call)); !text.empty() || !call.arguments.value_cache.present()) return text;
  return check(v_cache(call));
}

std::string storages(const Call& call) {
  const ElementType type = call.arguments.query.type;
  if (std::string text = storage(k_cache(call), type); !text.empty() || !call.arguments.value_cache.present()) {
    return text;
  }
  return storage(v_cache(call), type);
}

constexpr Rule kRules[] = {
    {"T1", "query is float32, float16 or bfloat16; its type is called T.", query_type},
    {"T2",
     "key, value, cos_cache, sin_cache, head_sink, q_norm_weight, k_norm_weight, attention_bias and output have type "
     "T.",
     same_as_query},
    {"T3", "cumulative_sequence_length, past_seqlens, attention_metadata and query_positions are int32.",
     int32_tensors},
    {"T4", "block_table is int32 or int64.", block_table_type},
    {"T5", "slot_mapping has the type of block_table.", slot_mapping_type},
    {"T6", "k_scale, v_scale and lse are float32.", float32_tensors},
    {"T7", "output_qk is float32, float16 or bfloat16.", output_qk_type},
    {"T8", "Each cache is T, int8, float8e4m3fn or uint8; under float32 also float16 or bfloat16. K and V may differ.",
     storages},
    {"T9",
     "k_cache_dtype and v_cache_dtype are int4 or float4e2m1 for a uint8 cache; else empty or the cache's own type.",
     both_caches<dtype>},
    {"T10", "k_quant_type and v_quant_type are NONE exactly when the cache is float32, float16 or bfloat16.",
     both_caches<quant>},
};

}  // namespace

std::span<const Rule> type_rules() noexcept {
  return kRules;
}

}  // namespace octavo::contract
