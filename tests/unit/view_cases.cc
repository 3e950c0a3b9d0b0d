#include <limits>

#include "rule_cases.h"

namespace octavo::test {

std::vector<RuleCase> view_cases() {
  using enum ValidCall::Base;
  return {
      {"V1", kPlain,
       [](ValidCall& c) {
         c.arguments.past_seqlens = {c.past.data(), ElementType::kInt32, {1, 1, 1, 1, 2}};
       },
       "past_seqlens: rank must be 0 to 4, got 5; its shape is (batch_size)"},
      {"V1", kPlain, [](ValidCall& c) { c.arguments.query.rank = -1; },
       "query: rank must be 0 to 4, got -1; its shape is (token_count, num_heads*head_size), or (token_count, "
       "(num_heads + 2*kv_num_heads)*head_size) when packed"},
      {"V2", kPlain, [](ValidCall& c) { c.arguments.key_cache.type = static_cast<ElementType>(99); },
       "key_cache: unknown element type, got enumerator 99; use one of ElementType"},
      {"V3", kPlain, [](ValidCall& c) { c.arguments.block_table.shape[1] = -3; },
       "block_table: extents must not be negative, got shape (2, -3); its shape is (batch_size, "
       "max_blocks_per_sequence)"},
      {"V3", kPlain,
       [](ValidCall& c) {
         c.arguments.key_cache = {c.keys.data(), ElementType::kFloat32, {std::int64_t{1} << 40, 1 << 20, 2, 16}};
       },
       "key_cache: a tensor has at most 2^60 bytes, got shape (1099511627776, 1048576, 2, 16) of float32; its shape is "
       "(num_blocks, block_size, kv_num_heads, head_size or head_size/2 bytes for a 4-bit cache)"},
      {"V3", kPlain,  // the product is 0, and yet sizes made of the other extents would overflow
       [](ValidCall& c) {
         c.arguments.key_cache.shape = {0, std::numeric_limits<std::int64_t>::max(), ValidCall::kKvHeads, 16};
       },
       "key_cache: a tensor has at most 2^60 bytes, got shape (0, 9223372036854775807, 2, 16) of float32; its shape is "
       "(num_blocks, block_size, kv_num_heads, head_size or head_size/2 bytes for a 4-bit cache)"},
      {"V4", kPlain, [](ValidCall& c) { c.arguments.past_seqlens.data = nullptr; },
       "past_seqlens: has elements, so it needs a data pointer, got null with shape (2); pass its memory, or an extent "
       "of 0"},
      {"V4", kFull, [](ValidCall& c) { c.arguments.attention_metadata.data = nullptr; },
       "attention_metadata: has elements, so it needs a data pointer, got null with shape (3); pass its memory, or an "
       "extent of 0"},
      {"V5", kPlain,
       [](ValidCall& c) { c.arguments.query.data = reinterpret_cast<const std::byte*>(c.floats.data()) + 2; },
       "query: the data pointer must be aligned to the 4 bytes of float32, got an address that is 2 past a multiple of "
       "it; copy the tensor"},
      {"V6", kPlain, [](ValidCall& c) { c.arguments.query.strides[0] = 256; },
       "query: must be contiguous, row-major, got shape (5, 64) with strides (256, 1); copy it, only the caches may be "
       "strided"},
      {"V7", kPlain, [](ValidCall& c) { c.arguments.key_cache.strides[3] = 2; },
       "key_cache: the last dimension must be contiguous (stride 1), got shape (8, 16, 2, 16) with strides (512, 32, "
       "16, 2); keep the channels of a head together"},
      {"V7", kPlain, [](ValidCall& c) { c.arguments.value_cache.strides[0] = -512; },
       "value_cache: strides must not be negative, got shape (8, 16, 2, 16) with strides (-512, 32, 16, 1); pass the "
       "view in its memory order"},
      {"V7", kPlain, [](ValidCall& c) { c.arguments.key_cache.strides[2] = 8; },
       "key_cache: blocks, slots and heads must not share memory, got shape (8, 16, 2, 16) with strides (512, 32, 8, "
       "1); strides count stored elements, not bytes"},
      {"V7", kPlain, [](ValidCall& c) { c.arguments.key_cache.strides[0] = 0; },
       "key_cache: blocks, slots and heads must not share memory, got shape (8, 16, 2, 16) with strides (0, 32, 16, "
       "1); strides count stored elements, not bytes"},
      {"V7", kPlain,
       [](ValidCall& c) { c.arguments.key_cache.strides[0] = std::numeric_limits<std::int64_t>::max() / 2; },
       "key_cache: a cache spans at most 2^57 elements, got shape (8, 16, 2, 16) with strides (4611686018427387903, "
       "32, 16, 1); check the strides"},
      {"V7", kPlain,  // one block, whose stride leads nowhere, and yet is too large to be turned into bytes
       [](ValidCall& c) {
         c.arguments.key_cache = {c.keys.data(), ElementType::kFloat32, {1, 16, 2, 16}};
         c.arguments.key_cache.strides[0] = std::numeric_limits<std::int64_t>::min();
       },
       "key_cache: a cache spans at most 2^57 elements, got shape (1, 16, 2, 16) with strides (-9223372036854775808, "
       "32, "
       "16, 1); check the strides"},
  };
}

}  // namespace octavo::test
