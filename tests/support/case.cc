#include "support/case.h"

#include <algorithm>
#include <numeric>
#include <sstream>

#include "support/codecs.h"

namespace octavo::testing {
namespace {

// Spelled here: a failure must print even where the library's own names are what failed.
const char* spell(ElementType type) {
  switch (type) {
    case ElementType::kFloat32: return "float32";
    case ElementType::kFloat16: return "float16";
    case ElementType::kBFloat16: return "bfloat16";
    case ElementType::kInt32: return "int32";
    case ElementType::kInt64: return "int64";
    default: return "other";
  }
}

const char* spell(CacheType type) {
  switch (type) {
    case CacheType::kTensorType: return "T";
    case CacheType::kFloat32: return "float32";
    case CacheType::kFloat16: return "float16";
    case CacheType::kBFloat16: return "bfloat16";
    case CacheType::kInt8: return "int8";
    case CacheType::kFloat8E4M3FN: return "float8e4m3fn";
    case CacheType::kInt4: return "int4";
    case CacheType::kFloat4E2M1: return "float4e2m1";
  }
  return "?";
}

const char* spell(QuantType type) {
  return type == QuantType::kNone ? "NONE" : type == QuantType::kPerTensor ? "PER_TENSOR" : "PER_CHANNEL";
}
const char* spell(TableStyle style) {
  constexpr const char* kNames[] = {"contiguous", "shuffled", "shared_prefix", "ring"};
  return kNames[static_cast<int>(style)];
}
const char* spell(BelowWindow style) {
  return style == BelowWindow::kStale ? "stale" : "unmapped";
}
const char* spell(CacheOrder order) {
  constexpr const char* kNames[] = {"token_major", "head_major", "kv_interleaved"};
  return kNames[static_cast<int>(order)];
}
const char* spell(SlotStyle style) {
  constexpr const char* kNames[] = {"absent", "derived", "some_unset", "elsewhere"};
  return kNames[static_cast<int>(style)];
}
const char* spell(BiasShape shape) {
  constexpr const char* kNames[] = {"absent", "full", "broadcast_batch", "broadcast_heads", "broadcast_both"};
  return kNames[static_cast<int>(shape)];
}
const char* spell(Rotary rotary) {
  constexpr const char* kNames[] = {"none", "half", "interleaved"};
  return kNames[static_cast<int>(rotary)];
}
const char* spell(Positions positions) {
  constexpr const char* kNames[] = {"absent", "sequential", "tree"};
  return kNames[static_cast<int>(positions)];
}
const char* spell(Metadata metadata) {
  constexpr const char* kNames[] = {"absent", "tight", "loose", "unknown"};
  return kNames[static_cast<int>(metadata)];
}
template <typename T>
requires std::is_arithmetic_v<T> T spell(T value) {
  return value;
}
std::string spell(const std::vector<std::int64_t>& values) {
  std::string text = "[";
  for (const std::int64_t value : values) {
    if (text.size() > 1) text += ',';
    text += std::to_string(value);
  }
  return text += ']';
}

}  // namespace

std::int64_t Case::new_tokens() const {
  return std::accumulate(added.begin(), added.end(), std::int64_t{0});
}

std::int64_t Case::rotary_width() const {
  if (rotary == Rotary::kNone) return 0;
  return rotary_dim != 0 ? rotary_dim : head_size - rotary_offset;
}

CacheType Case::k_format() const {
  return k_cache == CacheType::kTensorType ? format_of(type) : k_cache;
}

CacheType Case::v_format() const {
  if (latent) return k_format();
  return v_cache == CacheType::kTensorType ? format_of(type) : v_cache;
}

std::int64_t Case::position_limit() const {
  std::int64_t limit = 1;
  for (std::int64_t b = 0; b < batch_size(); ++b) limit = std::max(limit, kv_length(b));
  return positions == Positions::kTree ? limit + 3 : limit;
}

std::string to_string(const Case& c) {
  const Case base;
  std::ostringstream out;
  if (!c.name.empty()) out << c.name << ": ";
  out << "seed=" << c.seed;
  const auto add = [&out](const char* field, const auto& value, const auto& usual) {
    if (value != usual) out << ' ' << field << '=' << spell(value);
  };
#define OCTAVO_ADD(field) add(#field, c.field, base.field)
  OCTAVO_ADD(num_heads);
  OCTAVO_ADD(kv_num_heads);
  OCTAVO_ADD(head_size);
  OCTAVO_ADD(block_size);
  out << " past=" << spell(c.past) << " added=" << spell(c.added);
  OCTAVO_ADD(identities);
  OCTAVO_ADD(padding_tokens);
  OCTAVO_ADD(table_columns);
  OCTAVO_ADD(spare_blocks);
  OCTAVO_ADD(type);
  OCTAVO_ADD(k_cache);
  OCTAVO_ADD(v_cache);
  OCTAVO_ADD(k_quant);
  OCTAVO_ADD(v_quant);
  OCTAVO_ADD(index_type);
  OCTAVO_ADD(output_qk_type);
  OCTAVO_ADD(latent);
  OCTAVO_ADD(v_head_size);
  OCTAVO_ADD(scale);
  OCTAVO_ADD(softcap);
  OCTAVO_ADD(window);
  OCTAVO_ADD(causal);
  OCTAVO_ADD(rotary);
  OCTAVO_ADD(rotary_dim);
  OCTAVO_ADD(rotary_offset);
  OCTAVO_ADD(qk_output);
  OCTAVO_ADD(packed_qkv);
  OCTAVO_ADD(head_sink);
  OCTAVO_ADD(qk_norm);
  OCTAVO_ADD(lse);
  OCTAVO_ADD(bias);
  OCTAVO_ADD(bias_masks);
  OCTAVO_ADD(slots);
  OCTAVO_ADD(positions);
  OCTAVO_ADD(metadata);
  OCTAVO_ADD(table);
  OCTAVO_ADD(below_window);
  OCTAVO_ADD(unmapped_holes);
  OCTAVO_ADD(cache_order);
  OCTAVO_ADD(hostile);
  OCTAVO_ADD(query_magnitude);
  OCTAVO_ADD(key_magnitude);
  OCTAVO_ADD(value_magnitude);
  OCTAVO_ADD(sink_low);
  OCTAVO_ADD(sink_high);
#undef OCTAVO_ADD
  return out.str();
}

void PrintTo(const Case& c, std::ostream* out) {
  *out << to_string(c);
}

Case with_cache(Case c, CacheType k, QuantType k_quant, CacheType v, QuantType v_quant) {
  c.k_cache = k;
  c.k_quant = is_quantized(k) ? k_quant : QuantType::kNone;
  c.v_cache = c.latent ? CacheType::kTensorType : v;
  c.v_quant = !c.latent && is_quantized(v) ? v_quant : QuantType::kNone;
  return c;
}

}  // namespace octavo::testing
