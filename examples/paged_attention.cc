// Two sequences of 4 and 1 new tokens share a paged cache; each attends to its own tokens.
#include <cstdio>
#include <vector>

#include "octavo/paged_attention.h"

int main() {
  using enum octavo::ElementType;
  constexpr int kTokens = 5, kHeads = 4, kKvHeads = 2, kHeadSize = 64, kBlocks = 8, kBlockSize = 16;
  std::vector<float> query(kTokens * kHeads * kHeadSize, 0.5f), key(kTokens * kKvHeads * kHeadSize, 0.25f), value = key;
  std::vector<float> key_cache(kBlocks * kBlockSize * kKvHeads * kHeadSize), value_cache = key_cache;
  std::vector<float> output(query.size());
  std::vector<int> token_offsets = {0, 4, 5}, past_lengths = {0, 0}, block_table = {3, 1};

  octavo::Arguments arguments;
  arguments.query = {query.data(), kFloat32, {kTokens, kHeads * kHeadSize}};
  arguments.key = {key.data(), kFloat32, {kTokens, kKvHeads * kHeadSize}};
  arguments.value = {value.data(), kFloat32, {kTokens, kKvHeads * kHeadSize}};
  arguments.key_cache = {key_cache.data(), kFloat32, {kBlocks, kBlockSize, kKvHeads, kHeadSize}};
  arguments.value_cache = {value_cache.data(), kFloat32, {kBlocks, kBlockSize, kKvHeads, kHeadSize}};
  arguments.cumulative_sequence_length = {token_offsets.data(), kInt32, {3}};
  arguments.past_seqlens = {past_lengths.data(), kInt32, {2}};
  arguments.block_table = {block_table.data(), kInt32, {2, 1}};
  arguments.output = {output.data(), kFloat32, {kTokens, kHeads * kHeadSize}};
  octavo::Status status = octavo::paged_attention(arguments, {.num_heads = kHeads, .kv_num_heads = kKvHeads});

  if (!status.ok()) {
    std::printf("%s\n", status.message().c_str());
    return 1;
  }
  std::printf("every value is %g\n", output.back());  // 0.25: the average of equal values
}
