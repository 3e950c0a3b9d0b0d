#include "rule_cases.h"

namespace octavo::test {
namespace {

using enum ElementType;

template <auto Member>
void set_shape(ValidCall& call, std::initializer_list<std::int64_t> shape) {
  auto& view = call.arguments.*Member;
  view = {view.data, view.type, shape};
}

}  // namespace

std::vector<RuleCase> shape_cases() {
  using enum ValidCall::Base;
  return {
      {"S1", kPlain,
       [](ValidCall& c) {
         set_shape<&Arguments::key>(c, {4, 32});
       },
       "key: shape must be (token_count, kv_num_heads*head_size), here (5, 32), got (4, 32); it has query's tokens and "
       "head_size, and kv_num_heads heads"},
      {"S1", kLatent,
       [](ValidCall& c) {
         set_shape<&Arguments::key>(c, {5, 16});
       },
       "key: shape must be (token_count, kv_num_heads*head_size), here (5, 32), got (5, 16); it has query's tokens and "
       "head_size, and kv_num_heads heads"},
      {"S2", kPlain,
       [](ValidCall& c) {
         set_shape<&Arguments::value>(c, {5, 64});
       },
       "value: shape must be (token_count, kv_num_heads*head_size), here (5, 32), got (5, 64); it has query's tokens "
       "and head_size, and kv_num_heads heads"},
      {"S3", kPlain,
       [](ValidCall& c) {
         set_shape<&Arguments::key_cache>(c, {8, 16, 1, 16});
       },
       "key_cache: shape must be (num_blocks, block_size, kv_num_heads, head_size or head_size/2 bytes for a 4-bit "
       "cache), here (8, 16, 2, 16), got (8, 16, 1, 16); head_size is taken from query"},
      {"S3", kQuantized,
       [](ValidCall& c) {
         set_shape<&Arguments::key_cache>(c, {8, 16, 2, 8});
       },
       "key_cache: shape must be (num_blocks, block_size, kv_num_heads, head_size or head_size/2 bytes for a 4-bit "
       "cache), here (8, 16, 2, 16), got (8, 16, 2, 8); head_size is taken from query"},
      {"S4", kPlain,
       [](ValidCall& c) {
         set_shape<&Arguments::value_cache>(c, {7, 16, 2, 16});
       },
       "value_cache: shape must be (num_blocks, block_size, kv_num_heads, head_size or head_size/2 bytes for a 4-bit "
       "cache), here (8, 16, 2, 16), got (7, 16, 2, 16); it has the blocks of key_cache, since block_table finds both"},
      {"S4", kQuantized,
       [](ValidCall& c) {
         set_shape<&Arguments::value_cache>(c, {8, 16, 2, 16});
       },
       "value_cache: shape must be (num_blocks, block_size, kv_num_heads, head_size or head_size/2 bytes for a 4-bit "
       "cache), here (8, 16, 2, 8), got (8, 16, 2, 16); it has the blocks of key_cache, since block_table finds both"},
      {"S5", kPlain, [](ValidCall& c) { set_shape<&Arguments::past_seqlens>(c, {1}); },
       "past_seqlens: shape must be (batch_size), here (2), got (1); batch_size is one less than the length of "
       "cumulative_sequence_length"},
      {"S6", kPlain,
       [](ValidCall& c) {
         set_shape<&Arguments::block_table>(c, {1, 3});
       },
       "block_table: shape must be (batch_size, max_blocks_per_sequence), here (2, 3), got (1, 3); batch_size is one "
       "less than the length of cumulative_sequence_length"},
      {"S7", kFull,
       [](ValidCall& c) {
         set_shape<&Arguments::sin_cache>(c, {63, 8});
       },
       "sin_cache: shape must be (max_seq_len, rotary_dim/2), here (64, 8), got (63, 8); it has the shape of "
       "cos_cache"},
      {"S8", kFull, [](ValidCall& c) { set_shape<&Arguments::slot_mapping>(c, {4}); },
       "slot_mapping: shape must be (token_count), here (5), got (4); give every token of query a slot, -1 = do not "
       "write"},
      {"S9", kFull, [](ValidCall& c) { set_shape<&Arguments::head_sink>(c, {2}); },
       "head_sink: shape must be (num_heads), here (4), got (2); give every query head one logit"},
      {"S10", kFull, [](ValidCall& c) { set_shape<&Arguments::q_norm_weight>(c, {64}); },
       "q_norm_weight: shape must be (head_size), here (16), got (64); all heads share one weight a channel"},
      {"S11", kFull, [](ValidCall& c) { set_shape<&Arguments::k_norm_weight>(c, {32}); },
       "k_norm_weight: shape must be (head_size), here (16), got (32); all heads share one weight a channel"},
      {"S12", kQuantized, [](ValidCall& c) { set_shape<&Arguments::k_scale>(c, {1}); },
       "k_scale: shape must be (1) for PER_TENSOR or (kv_num_heads, 1, head_size) for PER_CHANNEL, here (2, 1, 16), "
       "got (1); it follows k_quant_type"},
      {"S13", kQuantized,
       [](ValidCall& c) {
         set_shape<&Arguments::v_scale>(c, {2, 1, 16});
       },
       "v_scale: shape must be (1) for PER_TENSOR or (kv_num_heads, 1, head_size) for PER_CHANNEL, here (1), got (2, "
       "1, 16); it follows v_quant_type"},
      {"S14", kFull,
       [](ValidCall& c) {
         set_shape<&Arguments::query_positions>(c, {2, 2});
       },
       "query_positions: shape must be (token_count), here (5), got (2, 2); give every token of query a position"},
      {"S15", kFull,
       [](ValidCall& c) {
         set_shape<&Arguments::attention_bias>(c, {3, 4, 3, 48});
       },
       "attention_bias: shape must be (batch_size or 1, num_heads or 1, query capacity, context capacity) with "
       "batch_size = 2 and num_heads = 4, got (3, 4, 3, 48); 1 broadcasts"},
      {"S15", kFull,
       [](ValidCall& c) {
         set_shape<&Arguments::attention_bias>(c, {2, 2, 3, 48});
       },
       "attention_bias: shape must be (batch_size or 1, num_heads or 1, query capacity, context capacity) with "
       "batch_size = 2 and num_heads = 4, got (2, 2, 3, 48); 1 broadcasts"},
      {"S16", kPlain,
       [](ValidCall& c) {
         set_shape<&Arguments::output>(c, {5, 32});
       },
       "output: shape must be (token_count, num_heads*v_head_size), v_head_size 0 meaning head_size, here (5, 64), got "
       "(5, 32); allocate that shape"},
      {"S16", kLatent,
       [](ValidCall& c) {
         set_shape<&Arguments::output>(c, {5, 64});
       },
       "output: shape must be (token_count, num_heads*v_head_size), v_head_size 0 meaning head_size, here (5, 32), got "
       "(5, 64); allocate that shape"},
      {"S17", kFull,
       [](ValidCall& c) {
         set_shape<&Arguments::lse>(c, {5, 4});
       },
       "lse: shape must be (num_heads, token_count), here (4, 5), got (5, 4); allocate that shape"},
      {"B1", kFull, [](ValidCall& c) { set_shape<&Arguments::attention_metadata>(c, {1}); },
       "attention_metadata: shape must be (2) or (3), got (1); pass [bound of the query length, bound of the KV "
       "length, optional lower bound of the largest KV length], 0 = unknown"},
      {"B1", kFull,
       [](ValidCall& c) {
         set_shape<&Arguments::attention_metadata>(c, {1, 2});
       },
       "attention_metadata: shape must be (2) or (3), got (1, 2); pass [bound of the query length, bound of the KV "
       "length, optional lower bound of the largest KV length], 0 = unknown"},
      {"B2", kFull, [](ValidCall& c) { c.metadata[1] = -40; },
       "attention_metadata: bounds must not be negative, got -40 at index 1; 0 means unknown"},
      {"B3", kFull, [](ValidCall& c) { c.metadata[2] = 41; },
       "attention_metadata: the lower bound of the largest KV length (index 2) must not exceed the upper one (index "
       "1), got 41 and 40; 0 means unknown"},
      {"B4", kFull,
       [](ValidCall& c) {
         set_shape<&Arguments::output_qk>(c, {4, 5, 48});
       },
       "output_qk: shape must be (num_heads, token_count, max_context_len), here (4, 5, 40), got (4, 5, 48); "
       "max_context_len is attention_metadata's bound of the KV length where it is given, else "
       "max_blocks_per_sequence*block_size"},
  };
}

}  // namespace octavo::test
