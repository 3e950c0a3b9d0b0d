// One call as the CUDA kernels see it: device pointers, byte strides and resolved sizes. Made once per run() and passed
// to every kernel by value; it holds no value out of device memory, so a captured graph may keep it.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>

#include "octavo/paged_attention.h"

#if defined(__CUDACC__)
#define OCTAVO_HOST_DEVICE __host__ __device__
#else
#define OCTAVO_HOST_DEVICE
#endif

namespace octavo::cuda {

// Keys are shared out to blocks in chunks of this many positions, counted from position 0 of a sequence; at most
// kMaxChunks a sequence, so that longer ones have chunks of twice, four times, ... the length. A row's bits thus depend
// on its own sequence's lengths and on nothing else in the batch.
inline constexpr int kChunkKeys = 512;
inline constexpr int kMaxChunks = 32;

// Sequences with more new tokens have enough rows to fill a device: one block walks all keys of a row.
inline constexpr int kMaxSplitTokens = 16;

// Keys in a chunk of a sequence of this length.
OCTAVO_HOST_DEVICE inline std::int64_t chunk_keys(std::int64_t kv_length) {
  std::int64_t keys = kChunkKeys;
  while (keys * kMaxChunks < kv_length) keys *= 2;
  return keys;
}

// A sequence's part of the call.
struct SequenceSpan {
  std::int32_t start;       // first token; never below the one before it, whatever the input holds
  std::int32_t new_tokens;  // 0 for a sequence whose lengths or positions break the contract
  std::int32_t past;

  OCTAVO_HOST_DEVICE std::int32_t kv_length() const { return past + new_tokens; }
};

// What the schedule kernel leaves for the others: one record per sequence, one more behind the last.
struct SequenceRecord : SequenceSpan {
  std::int32_t tile_begin;   // row tiles of the sequences before it, per KV head
  std::int32_t split_begin;  // tokens of the split sequences before it
  std::int32_t rejected;     // a query position is out of range
};

// int32 or int64 ids behind one accessor.
struct Indices {
  const void* data = nullptr;
  bool wide = false;

  OCTAVO_HOST_DEVICE std::int64_t operator[](std::int64_t i) const {
    return wide ? static_cast<const std::int64_t*>(data)[i] : static_cast<const std::int32_t*>(data)[i];
  }
};

// Rows of T, one per token, of which a head's channels start at head * head_bytes.
struct TokenRows {
  const std::byte* data = nullptr;
  std::int64_t token_bytes = 0;
  std::int64_t head_bytes = 0;
  bool aligned = false;  // every row starts at a multiple of 16 bytes

  OCTAVO_HOST_DEVICE const std::byte* row(std::int64_t token, std::int64_t head) const {
    return data + token * token_bytes + head * head_bytes;
  }
};

// A paged cache with any strides over block, slot and head.
struct Cache {
  std::byte* data = nullptr;
  std::int64_t block_bytes = 0, slot_bytes = 0, head_bytes = 0;
  CacheType type = CacheType::kFloat32;
  const float* scale = nullptr;  // nullptr: not quantised
  bool per_channel = false;      // scale is (kv_num_heads, head_size), else one number
  bool aligned = false;          // every 8 channels start at a multiple of their size, or of 16 bytes

  OCTAVO_HOST_DEVICE std::int64_t offset(std::int64_t block, std::int64_t slot, std::int64_t head) const {
    return block * block_bytes + slot * slot_bytes + head * head_bytes;
  }
  OCTAVO_HOST_DEVICE float tensor_scale() const { return scale != nullptr && !per_channel ? *scale : 1.0f; }
  OCTAVO_HOST_DEVICE float channel_scale(std::int64_t head, std::int64_t channel, std::int64_t head_size) const {
    return per_channel ? scale[head * head_size + channel] : 1.0f;
  }
};

// The workspace, carved.
struct Scratch {
  SequenceRecord* records = nullptr;  // [batch_size + 1]; nullptr: no schedule kernel, kernels make their own
  float* sums = nullptr;              // [split tokens][num_heads][chunks][v_head_size], relative to the chunk's maximum
  float2* states = nullptr;           // [split tokens][num_heads][chunks]: maximum, weight
  std::int32_t chunks = 1;            // blocks that share out the keys of a split row; 1: nothing is split
  std::int32_t tile_rows = 16;        // rows of a tile (general/tuning.h)
  std::int32_t decode_tokens = 0;     // sequences of at most this many new tokens are another kernel's (decode/)
  std::uint32_t* counters = nullptr;  // words that the first kernel sets to zero
  std::int32_t counter_count = 0;
  bool overlaps = false;  // the device starts kernels before the one ahead has ended (device/overlap.cuh)
};

struct Call {
  // sizes and semantics
  std::int32_t token_count = 0, batch_size = 0, num_heads = 0, kv_num_heads = 0, group = 1, head_size = 0,
               v_head_size = 0;
  std::int64_t num_blocks = 0, block_size = 0, table_columns = 0, context_capacity = 0;
  std::int64_t rotary_max_positions = 0;
  std::int32_t rotary_half = 0, rotary_offset = 0;
  std::int64_t window = -1;
  std::int64_t bias_query_capacity = 0, bias_context_capacity = 0;
  std::int64_t bias_batch_stride = 0, bias_head_stride = 0;  // elements; 0 where the dimension broadcasts
  std::int64_t max_context_len = 0;                          // last dimension of output_qk
  float scale = 1.0f, softcap = 0.0f, inverse_softcap = 0.0f, norm_epsilon = 0.0f;
  bool causal = true, latent = false, rotary_interleaved = false;
  QkOutput qk_output = QkOutput::kNone;
  ElementType element_type = ElementType::kUndefined;
  ElementType output_qk_type = ElementType::kUndefined;

  // tensors
  TokenRows query, key, value;
  Cache k_cache, v_cache;  // v_cache equals k_cache in LATENT
  const std::int32_t* cumulative = nullptr;
  const std::int32_t* past = nullptr;
  const std::int32_t* positions = nullptr;  // query_positions or nullptr
  Indices block_table, slot_mapping;        // slot_mapping.data is nullptr where absent
  const void *cos = nullptr, *sin = nullptr, *sink = nullptr, *q_norm = nullptr, *k_norm = nullptr, *bias = nullptr;
  void* output = nullptr;
  void* output_qk = nullptr;
  float* lse = nullptr;

  Scratch scratch;
};

// Hands out pieces of the workspace, each at a multiple of its alignment; only counts when there is none.
class Carver {
 public:
  explicit Carver(void* data) : data_(static_cast<std::byte*>(data)) {}
  template <typename T>
  T* take(std::int64_t count) {
    used_ = (used_ + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    std::byte* taken = data_ == nullptr ? nullptr : data_ + used_;
    used_ += static_cast<std::size_t>(count) * sizeof(T);
    return reinterpret_cast<T*>(taken);
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* data_;
  std::size_t used_ = 0;
};

// What the general attention needs; returns the bytes taken so far.
std::size_t carve(const Problem& problem, Carver& carver, Scratch& scratch) noexcept;

Call make_call(const Problem& problem, const Arguments& arguments, const Scratch& scratch) noexcept;

}  // namespace octavo::cuda
