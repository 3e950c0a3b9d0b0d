// One call as the CPU kernels see it: raw pointers, byte strides and resolved sizes. Made once per run(), read by every
// task.
#pragma once

#include <cstddef>
#include <cstdint>

#include "octavo/paged_attention.h"

namespace octavo::cpu {

// int32 or int64 ids behind one accessor.
struct IndexArray {
  const void* data = nullptr;
  bool wide = false;

  std::int64_t operator[](std::int64_t i) const noexcept {
    return wide ? static_cast<const std::int64_t*>(data)[i] : static_cast<const std::int32_t*>(data)[i];
  }
};

// Rows of T, one per token, of which a head's channels start at head * head_bytes.
struct TokenRows {
  const std::byte* data = nullptr;
  std::int64_t token_bytes = 0;
  std::int64_t head_bytes = 0;

  const std::byte* row(std::int64_t token, std::int64_t head) const noexcept {
    return data + token * token_bytes + head * head_bytes;
  }
};

// The value of a decoded 1 (codecs-inl.h): a power of two, so that it goes into a scale without an error.
constexpr float code_unit(CacheType type) noexcept {
  if (type == CacheType::kFloat8E4M3FN) return 256.0f;
  return type == CacheType::kFloat4E2M1 ? 16384.0f : 1.0f;
}

// A paged cache with any strides over block, slot and head.
struct Cache {
  std::byte* data = nullptr;
  std::int64_t block_bytes = 0, slot_bytes = 0, head_bytes = 0;
  CacheType type = CacheType::kFloat32;
  const float* scale = nullptr;  // nullptr: not quantised
  bool per_channel = false;      // scale is (kv_num_heads, head_size), else one number

  std::byte* row(std::int64_t block, std::int64_t slot, std::int64_t head) const noexcept {
    return data + block * block_bytes + slot * slot_bytes + head * head_bytes;
  }
  // x[c] *= factor * the scale of decoded numbers of a head's channel c.
  void apply_scale(std::int64_t head, std::int64_t head_size, float factor, std::int64_t width,
                   float* x) const noexcept {
    if (per_channel) {
      const float* of_channel = scale + head * head_size;
      for (std::int64_t c = 0; c < width; ++c) x[c] = in_units(x[c], factor * of_channel[c]);
    } else {
      if (scale != nullptr) factor *= scale[0];
      for (std::int64_t c = 0; c < width; ++c) x[c] = in_units(x[c], factor);
    }
  }

 private:
  // x * factor * code_unit(). The unit joins what it cannot drive out of float's range: a small factor, or the product
  // with a large one, which is smaller than the result.
  float in_units(float x, float factor) const noexcept {
    const float unit = code_unit(type);
    return factor < 1.0f && factor > -1.0f ? x * (factor * unit) : x * factor * unit;
  }
};

struct Call {
  const Problem* problem = nullptr;
  TokenRows query, key, value;
  Cache k_cache, v_cache;  // v_cache unused in LATENT
  const std::int32_t* cumulative = nullptr;
  const std::int32_t* past = nullptr;
  const std::int32_t* positions = nullptr;  // query_positions or nullptr
  IndexArray block_table, slot_mapping;     // slot_mapping.data is nullptr where absent
  const std::byte *cos = nullptr, *sin = nullptr, *sink = nullptr, *q_norm = nullptr, *k_norm = nullptr;
  const std::byte* bias = nullptr;
  std::int64_t bias_batch_stride = 0, bias_head_stride = 0;  // elements; 0 where the dimension broadcasts
  std::byte* output = nullptr;
  std::byte* output_qk = nullptr;
  float* lse = nullptr;

  std::int64_t new_tokens(std::int64_t sequence) const noexcept {
    return cumulative[sequence + 1] - cumulative[sequence];
  }
  std::int64_t kv_length(std::int64_t sequence) const noexcept { return past[sequence] + new_tokens(sequence); }

  // The logical position of a sequence's j-th new token: for RoPE and for the causal and window masks.
  std::int64_t position(std::int64_t sequence, std::int64_t j) const noexcept {
    return positions != nullptr ? positions[cumulative[sequence] + j] : past[sequence] + j;
  }
};

Call make_call(const Problem& problem, const Arguments& arguments) noexcept;

}  // namespace octavo::cpu
