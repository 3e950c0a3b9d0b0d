// Risk: the installed package misses a header, a symbol or a link dependency (OpenMP) that the build tree has.
#include <cstdio>
#include <cstring>

#include "octavo/paged_attention.h"

int main() {
  if (std::strcmp(octavo::version(), "0.1.0") != 0) return std::puts("wrong version"), 1;

  // One sequence whose only token attends to itself: the output is its value.
  constexpr int kHeadSize = 8;
  float query[kHeadSize] = {1}, value[kHeadSize] = {3, 1, 4, 1, 5, 9, 2, 6}, output[kHeadSize] = {};
  float key_cache[16 * kHeadSize] = {}, value_cache[16 * kHeadSize] = {};
  std::int32_t offsets[] = {0, 1}, past[] = {0}, table[] = {0};
  using enum octavo::ElementType;
  octavo::Arguments arguments;
  arguments.query = {query, kFloat32, {1, kHeadSize}};
  arguments.key = {query, kFloat32, {1, kHeadSize}};
  arguments.value = {value, kFloat32, {1, kHeadSize}};
  arguments.key_cache = {key_cache, kFloat32, {1, 16, 1, kHeadSize}};
  arguments.value_cache = {value_cache, kFloat32, {1, 16, 1, kHeadSize}};
  arguments.cumulative_sequence_length = {offsets, kInt32, {2}};
  arguments.past_seqlens = {past, kInt32, {1}};
  arguments.block_table = {table, kInt32, {1, 1}};
  arguments.output = {output, kFloat32, {1, kHeadSize}};
  const octavo::Status status = octavo::paged_attention(arguments, {.num_heads = 1, .kv_num_heads = 1});
  if (!status.ok()) return std::puts(status.message().c_str()), 1;
  if (std::memcmp(output, value, sizeof(value)) != 0) return std::puts("wrong output"), 1;
  return 0;
}
