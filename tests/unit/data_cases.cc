#include <limits>

#include "rule_cases.h"

namespace octavo::test {
namespace {

void set_slot(ValidCall& call, std::size_t token, std::int32_t slot) {
  call.slots[token] = slot;
}

}  // namespace

std::vector<RuleCase> data_cases() {
  using enum ValidCall::Base;
  return {
      {"D1", kPlain, [](ValidCall& c) { c.offsets[0] = 1; },
       "cumulative_sequence_length[0]: must be 0, got 1; it is where the first sequence's tokens start"},
      {"D2", kPlain, [](ValidCall& c) { c.offsets[1] = 6; },
       "cumulative_sequence_length[2]: must not be below the value before it, got 5 after 6; an empty sequence repeats "
       "the value"},
      {"D2", kPlain, [](ValidCall& c) { c.offsets[1] = -3; },
       "cumulative_sequence_length[1]: must not be below the value before it, got -3 after 0; an empty sequence "
       "repeats the value"},
      {"D3", kPlain, [](ValidCall& c) { c.offsets[2] = 6; },
       "cumulative_sequence_length[2]: must be at most query's token_count = 5, got 6; query lacks tokens"},
      {"D4", kPlain, [](ValidCall& c) { c.past[1] = -1; },
       "past_seqlens[1]: must not be negative, got -1; it counts the tokens already in the cache"},
      {"D5", kPlain, [](ValidCall& c) { c.past[0] = 46; },
       "past_seqlens[0]: past plus new tokens must be at most 48, what a row of block_table can map, got 46 + 3; give "
       "block_table more columns"},
      {"D5", kPlain, [](ValidCall& c) { c.past[0] = std::numeric_limits<std::int32_t>::max(); },
       "past_seqlens[0]: past plus new tokens must be at most 48, what a row of block_table can map, got 2147483647 + "
       "3; give block_table more columns"},
      {"D6", kFull, [](ValidCall& c) { c.positions[3] = -2; },
       "query_positions[3]: must not be negative, got -2; only padding tokens past cumulative_sequence_length's last "
       "value may hold anything"},
      {"D7", kFull, [](ValidCall& c) { c.positions[4] = 64; },
       "query_positions[4]: must be below the 64 positions of cos_cache, got 64; pass a longer cos_cache and "
       "sin_cache"},
      {"D7", kLatent,
       [](ValidCall& c) {
         c.arguments.cos_cache = {c.floats.data(), ElementType::kFloat32, {6, 4}};
         c.arguments.sin_cache = c.arguments.cos_cache;
       },
       "past_seqlens[0]: the last new position must be below the 6 positions of cos_cache, got 6; pass a longer "
       "cos_cache and sin_cache"},
      {"D8", kPlain, [](ValidCall& c) { c.table[0] = 8; },
       "block_table[0, 0]: must be a block id below num_blocks = 8 or -1 (unmapped), got 8; give the column a block of "
       "the cache"},
      {"D8", kPlain, [](ValidCall& c) { c.table[3] = -7; },
       "block_table[1, 0]: must be a block id below num_blocks = 8 or -1 (unmapped), got -7; give the column a block "
       "of the cache"},
      {"D8", kPlain,
       [](ValidCall& c) {
         c.table[3] = 70000;
         c.widen_indices();
         c.wide[3] = (std::int64_t{1} << 32) + 1;  // 1, were it cut to 32 bits
       },
       "block_table[1, 0]: must be a block id below num_blocks = 8 or -1 (unmapped), got 4294967297; give the column a "
       "block of the cache"},
      {"D8", kFull, [](ValidCall& c) { c.table[0] = 8; },
       "block_table[0, 0]: must be a block id below num_blocks = 8 or -1 (unmapped), got 8; give the column a block of "
       "the cache"},
      {"D9", kFull, [](ValidCall& c) { set_slot(c, 1, 128); },
       "slot_mapping[1]: must be below num_blocks * block_size = 128 or -1 (do not write), got 128; a slot is block * "
       "block_size + offset"},
      {"D9", kFull, [](ValidCall& c) { set_slot(c, 0, -2); },
       "slot_mapping[0]: must be below num_blocks * block_size = 128 or -1 (do not write), got -2; a slot is block * "
       "block_size + offset"},
      {"D10", kFull, [](ValidCall& c) { set_slot(c, 3, 85); },
       "slot_mapping: two new tokens must not be written to one slot, got tokens 1 and 3 in slot 85 (block 5, offset "
       "5); give -1 to the one that is not to be kept"},
      {"D10", kPlain,
       [](ValidCall& c) {
         c.table[3] = 5;
         c.past[1] = 6;
       },
       "block_table: two new tokens must not be written to one slot, got tokens 2 and 3 in slot 86 (block 5, offset "
       "6); give sequences that append a last block of their own"},
      {"D11", kFull,
       [](ValidCall& c) {
         c.arguments.attention_bias = {c.floats.data(), ElementType::kFloat32, {1, 1, 2, 48}};
       },
       "attention_bias: its query capacity of 2 must cover every sequence, but sequence 0 has 3 new tokens; make "
       "dimension 2 larger"},
      {"D12", kFull,
       [](ValidCall& c) {
         c.arguments.attention_bias = {c.floats.data(), ElementType::kFloat32, {2, 4, 3, 6}};
       },
       "attention_bias: its context capacity of 6 must cover every sequence, but sequence 0 has 7 positions, past and "
       "new; make dimension 3 larger"},
      {"D13", kFull,
       [](ValidCall& c) {
         c.metadata = {0, 6, 0};
         c.arguments.attention_metadata.data = c.metadata.data();
         c.arguments.output_qk = {c.scores.data(), ElementType::kFloat32, {4, 5, 6}};
       },
       "output_qk: its last dimension of 6 must cover every sequence, but sequence 0 has 7 positions, past and new; "
       "raise attention_metadata's bound of the KV length"},
      {"D14", kQuantized, [](ValidCall& c) { c.scales[17] = 0.0f; },
       "k_scale: scales must be finite and above 0, got 0 at element 17; a channel that is always 0 takes any scale, "
       "such as 1"},
      {"D14", kQuantized, [](ValidCall& c) { c.scales[31] = std::numeric_limits<float>::quiet_NaN(); },
       "k_scale: scales must be finite and above 0, got nan at element 31; a channel that is always 0 takes any scale, "
       "such as 1"},
      {"D15", kQuantized,
       [](ValidCall& c) {
         static const float infinite = std::numeric_limits<float>::infinity();
         c.arguments.v_scale = {&infinite, ElementType::kFloat32, {1}};
       },
       "v_scale: scales must be finite and above 0, got inf at element 0; a channel that is always 0 takes any scale, "
       "such as 1"},
      {"D16", kPlain, [](ValidCall& c) { c.arguments.value_cache.data = c.keys.data(); },
       "value_cache: must not share memory with key_cache; got overlapping tensors; pass two tensors, or set "
       "kv_cache_layout to LATENT for MLA"},
      {"D17", kPlain, [](ValidCall& c) { c.arguments.output.data = c.keys.data(); },
       "output: must not share memory with key_cache; got overlapping tensors; pass a tensor of its own"},
  };
}

}  // namespace octavo::test
