#include <limits>

#include "rule_cases.h"

namespace octavo::test {
namespace {

using enum ElementType;

// Never read: validate() looks at shapes only.
TensorView unread(std::initializer_list<std::int64_t> shape) {
  alignas(64) static std::byte memory[64];
  return {memory, kFloat32, shape};
}

}  // namespace

std::vector<RuleCase> size_cases() {
  using enum ValidCall::Base;
  return {
      {"Z1", kPlain,
       [](ValidCall& c) {
         c.arguments.query = unread({5, 4, 16});
       },
       "query: rank must be 2, got rank 3 of shape (5, 4, 16); its shape is (token_count, num_heads*head_size), or "
       "(token_count, (num_heads + 2*kv_num_heads)*head_size) when packed"},
      {"Z2", kPlain,
       [](ValidCall& c) {
         c.arguments.query = unread({std::int64_t{1} << 31, 64});
       },
       "query: at most 2147483647 tokens, because cumulative_sequence_length is int32, got 2147483648; split the call"},
      {"Z3", kPlain,
       [](ValidCall& c) {
         c.arguments.query = unread({5, 66});
       },
       "query: must be a multiple of num_heads = 4 wide, got shape (5, 66); pass (token_count, num_heads*head_size)"},
      {"Z3", kPacked,
       [](ValidCall& c) {
         c.arguments.query = unread({5, 132});
       },
       "query: packed Q, K and V (key and value are absent) must be a multiple of num_heads + 2*kv_num_heads = 8 wide, "
       "got shape (5, 132); pass (token_count, (num_heads + 2*kv_num_heads)*head_size), or key and value"},
      {"Z4", kPlain,
       [](ValidCall& c) {
         c.arguments.query = unread({5, 4 * 12});
       },
       "query: head_size must be a multiple of 8, 8 to 512 in SEPARATE, got 12 (48 channels over 4 heads); check "
       "num_heads and query's shape"},
      {"Z4", kPlain,
       [](ValidCall& c) {
         c.arguments.query = unread({5, 0});
       },
       "query: head_size must be a multiple of 8, 8 to 512 in SEPARATE, got 0 (0 channels over 4 heads); check "
       "num_heads and query's shape"},
      {"Z4", kPlain,
       [](ValidCall& c) {
         c.arguments.query = unread({5, 4 * 520});
       },
       "query: head_size must be a multiple of 8, 8 to 512 in SEPARATE, got 520 (2080 channels over 4 heads); check "
       "num_heads and query's shape"},
      {"Z4", kLatent,
       [](ValidCall& c) {
         c.arguments.query = unread({5, 4 * 1032});
       },
       "query: head_size must be a multiple of 8, 8 to 1024 in LATENT, got 1032 (4128 channels over 4 heads); check "
       "num_heads and query's shape"},
      {"Z5", kLatent, [](ValidCall& c) { c.attributes.v_head_size = 17; },
       "v_head_size: must be 0 or at most head_size = 16, got 17; V is the leading part of a latent row"},
      {"Z5", kPlain, [](ValidCall& c) { c.attributes.v_head_size = 8; },
       "v_head_size: must be 0 or head_size in SEPARATE, where head_size = 16, got 8; only LATENT has a narrower V"},
      {"Z6", kLatent, [](ValidCall& c) { c.attributes.scale = 0.0f; },
       "scale: must be given when v_head_size differs from head_size, got none with v_head_size = 8 and head_size = "
       "16; an absorbed model scales by its width before absorption, which cannot be seen here"},
      {"Z7", kPlain,
       [](ValidCall& c) {
         c.arguments.key_cache = {c.keys.data(), kFloat32, {128, 2, 16}};
       },
       "key_cache: rank must be 4, got rank 3 of shape (128, 2, 16); its shape is (num_blocks, block_size, "
       "kv_num_heads, head_size or head_size/2 bytes for a 4-bit cache)"},
      {"Z8", kPlain,
       [](ValidCall& c) {
         c.arguments.key_cache = {c.keys.data(), kFloat32, {8, 0, 2, 16}};
       },
       "key_cache: block_size must be at least 1, got shape (8, 0, 2, 16); pass (num_blocks, block_size, kv_num_heads, "
       "head_size)"},
      {"Z9", kPlain,
       [](ValidCall& c) {
         c.arguments.cumulative_sequence_length = {c.offsets.data(), kInt32, {3, 1}};
       },
       "cumulative_sequence_length: rank must be 1, got rank 2 of shape (3, 1); its shape is (batch_size + 1)"},
      {"Z9", kPlain,
       [](ValidCall& c) {
         c.arguments.cumulative_sequence_length = {c.offsets.data(), kInt32, {0}};
       },
       "cumulative_sequence_length: must have batch_size + 1 elements, got shape (0); pass (0) as its only value for "
       "an empty batch"},
      {"Z10", kPlain,
       [](ValidCall& c) {
         c.arguments.block_table = {c.table.data(), kInt32, {4}};
       },
       "block_table: rank must be 2, got rank 1 of shape (4); its shape is (batch_size, max_blocks_per_sequence)"},
      {"Z11", kPlain,
       [](ValidCall& c) {
         c.arguments.block_table = {c.table.data(), kInt32, {0, std::int64_t{1} << 57}};
       },
       "block_table: max_blocks_per_sequence * block_size must be at most 2^40 positions, got 144115188075855872 * 16; "
       "check block_table's and key_cache's shapes"},
      {"Z12", kFull, [](ValidCall& c) { c.arguments.cos_cache = unread({512}); },
       "cos_cache: rank must be 2, got rank 1 of shape (512); its shape is (max_seq_len, rotary_dim/2)"},
      {"Z13", kFull,
       [](ValidCall& c) {
         c.arguments.cos_cache = unread({64, 9});
       },
       "cos_cache: rotary_offset + rotary_dim must be within head_size = 16 and rotary_dim/2 at least 1, got "
       "rotary_offset = 0 and shape (64, 9); pass (max_seq_len, rotary_dim/2)"},
      {"Z13", kFull,
       [](ValidCall& c) {
         c.arguments.cos_cache = unread({64, 0});
       },
       "cos_cache: rotary_offset + rotary_dim must be within head_size = 16 and rotary_dim/2 at least 1, got "
       "rotary_offset = 0 and shape (64, 0); pass (max_seq_len, rotary_dim/2)"},
      {"Z13", kLatent, [](ValidCall& c) { c.attributes.rotary_offset = 16; },
       "cos_cache: rotary_offset + rotary_dim must be within head_size = 16 and rotary_dim/2 at least 1, got "
       "rotary_offset = 16 and shape (64, 4); pass (max_seq_len, rotary_dim/2)"},
      {"Z13", kLatent, [](ValidCall& c) { c.attributes.rotary_offset = std::numeric_limits<std::int64_t>::max() - 7; },
       "cos_cache: rotary_offset + rotary_dim must be within head_size = 16 and rotary_dim/2 at least 1, got "
       "rotary_offset = 9223372036854775800 and shape (64, 4); pass (max_seq_len, rotary_dim/2)"},
      {"Z14", kFull,
       [](ValidCall& c) {
         c.arguments.attention_bias = unread({4, 3, 48});
       },
       "attention_bias: rank must be 4, got rank 3 of shape (4, 3, 48); its shape is (batch_size or 1, num_heads or 1, "
       "query capacity, context capacity)"},
  };
}

}  // namespace octavo::test
