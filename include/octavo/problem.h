// Problem: one legal call reduced to sizes, types and features. It holds no pointer and no value out of device memory,
// so the same Problem serves every replay of a captured graph. validate() makes it; plan() reads it.
#pragma once

#include <cstdint>
#include <string>

#include "octavo/tensor_view.h"

namespace octavo {

enum class QuantType : std::uint8_t { kNone, kPerTensor, kPerChannel };
enum class CacheLayout : std::uint8_t { kSeparate, kLatent };
enum class QkOutput : std::uint8_t { kNone = 0, kScores = 1, kProbabilities = 2 };

// What a cache element means. kTensorType: what the tensor's own element type says. The two 4-bit types name what a
// kUint8 cache holds.
enum class CacheType : std::uint8_t {
  kTensorType,
  kFloat32,
  kFloat16,
  kBFloat16,
  kInt8,
  kFloat8E4M3FN,
  kInt4,
  kFloat4E2M1
};

const char* name(QuantType type) noexcept;      // "NONE", "PER_TENSOR", "PER_CHANNEL"
const char* name(CacheType type) noexcept;      // "", "float32", "float16", ..., "int4", "float4e2m1"
const char* name(CacheLayout layout) noexcept;  // "SEPARATE", "LATENT"

// Bytes of one row of `width` logical elements (4-bit types round an odd width up).
constexpr std::int64_t row_bytes(CacheType type, std::int64_t width) noexcept {
  switch (type) {
    case CacheType::kInt4:
    case CacheType::kFloat4E2M1: return (width + 1) / 2;
    case CacheType::kInt8:
    case CacheType::kFloat8E4M3FN: return width;
    case CacheType::kFloat16:
    case CacheType::kBFloat16: return 2 * width;
    case CacheType::kFloat32:
    case CacheType::kTensorType: return 4 * width;
  }
  return 0;
}

// Everything beyond plain causal attention over a cache of T that a call can ask for.
enum class Feature : std::uint32_t {
  kPackedQkv = 1u << 0,
  kSlotMapping = 1u << 1,
  kRope = 1u << 2,
  kQkNorm = 1u << 3,
  kHeadSink = 1u << 4,
  kSoftcap = 1u << 5,
  kLocalWindow = 1u << 6,
  kNonCausal = 1u << 7,
  kAttentionBias = 1u << 8,
  kQueryPositions = 1u << 9,
  kOutputQk = 1u << 10,
  kLse = 1u << 11,
  kLatent = 1u << 12,
  kQuantizedCache = 1u << 13,
  kPerChannelScale = 1u << 14,
  kFourBitCache = 1u << 15,
  kStridedCache = 1u << 16,
  kInt64Indices = 1u << 17,
  kSmallBlocks = 1u << 18,  // block_size below 16 or not a power of two, which the built-in operator refuses
};
inline constexpr int kFeatureCount = 19;
const char* name(Feature feature) noexcept;  // "packed_qkv", "slot_mapping", ...

class FeatureSet {
 public:
  constexpr FeatureSet() noexcept = default;
  constexpr FeatureSet(Feature feature) noexcept : bits_(static_cast<std::uint32_t>(feature)) {}  // NOLINT

  static constexpr FeatureSet all() noexcept { return FeatureSet((1u << kFeatureCount) - 1u); }
  constexpr FeatureSet operator|(FeatureSet other) const noexcept { return FeatureSet(bits_ | other.bits_); }
  constexpr FeatureSet without(FeatureSet other) const noexcept { return FeatureSet(bits_ & ~other.bits_); }
  constexpr bool contains(FeatureSet other) const noexcept { return (other.bits_ & ~bits_) == 0; }
  constexpr bool empty() const noexcept { return bits_ == 0; }
  constexpr bool operator==(const FeatureSet&) const noexcept = default;

 private:
  explicit constexpr FeatureSet(std::uint32_t bits) noexcept : bits_(bits) {}
  std::uint32_t bits_ = 0;
};
constexpr FeatureSet operator|(Feature a, Feature b) noexcept {
  return FeatureSet(a) | FeatureSet(b);
}
std::string to_string(FeatureSet features);  // "head_sink, softcap"; "none" when empty

// How one cache (K, V, or the latent row) is stored.
struct CacheFormat {
  ElementType storage = ElementType::kUndefined;
  CacheType logical = CacheType::kTensorType;  // resolved: never kTensorType in a Problem
  QuantType quant = QuantType::kNone;
  bool operator==(const CacheFormat&) const noexcept = default;
};

struct Problem {
  // sizes
  std::int64_t token_count = 0;
  std::int64_t batch_size = 0;
  std::int64_t num_heads = 0;
  std::int64_t kv_num_heads = 0;
  std::int64_t head_size = 0;
  std::int64_t v_head_size = 0;  // effective: the width of output rows and of V; equals head_size in SEPARATE
  std::int64_t num_blocks = 0;
  std::int64_t block_size = 0;
  std::int64_t max_blocks_per_sequence = 0;
  std::int64_t rotary_dim = 0;            // 0 without RoPE
  std::int64_t rotary_max_positions = 0;  // rows of cos_cache; 0 without RoPE
  std::int64_t bias_batch = 0, bias_heads = 0, bias_query_capacity = 0, bias_context_capacity = 0;

  // launch bounds, replay-invariant (docs/contract.md, attention_metadata); never part of a mask
  std::int64_t max_query_len_bound = 0;  // attention_metadata[0] where given and not 0, else token_count
  std::int64_t max_kv_len_bound =
      0;  // attention_metadata[1] where given and not 0, clipped to the capacity, else the capacity
  std::int64_t max_context_len = 0;  // last dimension of output_qk: equals max_kv_len_bound

  // types
  ElementType element_type = ElementType::kUndefined;  // T
  ElementType index_type = ElementType::kInt32;        // block_table and slot_mapping
  ElementType output_qk_type = ElementType::kUndefined;
  CacheFormat k_cache;
  CacheFormat v_cache;  // equals k_cache in LATENT

  // semantics, resolved
  CacheLayout cache_layout = CacheLayout::kSeparate;
  QkOutput qk_output = QkOutput::kNone;
  float scale = 0.0f;  // never 0
  float softcap = 0.0f;
  float qk_norm_epsilon = 1e-6f;
  std::int64_t local_window_size = -1;
  std::int64_t rotary_offset = 0;
  bool is_causal = true;
  bool rotary_interleaved = false;

  FeatureSet features;

  std::int64_t group_size() const noexcept { return num_heads / kv_num_heads; }
  std::int64_t context_capacity() const noexcept { return max_blocks_per_sequence * block_size; }
  bool has(Feature feature) const noexcept { return features.contains(feature); }
  bool operator==(const Problem&) const noexcept = default;  // equal Problems have equal Plans
};

}  // namespace octavo
