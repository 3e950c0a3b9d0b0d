// How the oracle reads the operands of a call (internal to prologue.cc and reference.cc).
#pragma once

#include <cstdint>
#include <vector>

#include "octavo/paged_attention.h"
#include "support/codecs.h"

namespace octavo::testing {

inline constexpr double kRoundoff = 0x1.0p-24;  // of float32

struct Sizes {
  std::int64_t tokens, batch, num_heads, kv_heads, head_size, v_head_size, block_size, num_blocks, columns;
};

inline Sizes sizes_of(const Arguments& a, const Attributes& attributes) {
  Sizes s{};
  s.tokens = a.query.shape[0];
  s.batch = a.cumulative_sequence_length.shape[0] - 1;
  s.num_heads = attributes.num_heads;
  s.kv_heads = attributes.kv_num_heads;
  s.head_size = a.query.shape[1] / (a.key.present() ? s.num_heads : s.num_heads + 2 * s.kv_heads);
  const bool latent = attributes.kv_cache_layout == CacheLayout::kLatent;
  s.v_head_size = latent && attributes.v_head_size != 0 ? attributes.v_head_size : s.head_size;
  s.block_size = a.key_cache.shape[1];
  s.num_blocks = a.key_cache.shape[0];
  s.columns = a.block_table.shape[1];
  return s;
}

inline std::int64_t integer(const TensorView& tensor, std::int64_t index) {
  return tensor.type == ElementType::kInt64 ? static_cast<const std::int64_t*>(tensor.data)[index]
                                            : static_cast<const std::int32_t*>(tensor.data)[index];
}

inline double real(const TensorView& tensor, std::int64_t index) {
  return load(format_of(tensor.type), tensor.data, index);
}

// The slot of `position` in the table, -1 where it has none.
inline std::int64_t table_slot(const Arguments& a, const Sizes& s, std::int64_t sequence, std::int64_t position) {
  const std::int64_t column = position / s.block_size;
  if (column >= s.columns) return -1;
  const std::int64_t block = integer(a.block_table, sequence * s.columns + column);
  if (block < 0 || block >= s.num_blocks) return -1;
  return block * s.block_size + position % s.block_size;
}

struct TokenPlace {
  std::int64_t sequence = -1;  // -1: padding
  std::int64_t offset = 0;
  std::int64_t index = 0;     // in the sequence
  std::int64_t position = 0;  // for RoPE and masks
};

inline std::vector<TokenPlace> place_tokens(const Arguments& a, const Sizes& s) {
  std::vector<TokenPlace> places(static_cast<std::size_t>(s.tokens));
  for (std::int64_t b = 0; b < s.batch; ++b) {
    const std::int64_t begin = integer(a.cumulative_sequence_length, b);
    const std::int64_t end = integer(a.cumulative_sequence_length, b + 1);
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t index = integer(a.past_seqlens, b) + t - begin;
      const std::int64_t position = a.query_positions.present() ? integer(a.query_positions, t) : index;
      places[static_cast<std::size_t>(t)] = {b, t - begin, index, position};
    }
  }
  return places;
}

}  // namespace octavo::testing
