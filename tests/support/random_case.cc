#include <algorithm>
#include <string>

#include "support/case_list.h"
#include "support/codecs.h"
#include "support/random.h"

namespace octavo::testing {
namespace {

CacheType random_format(Random& random, ElementType type) {
  if (random.chance(0.4)) return CacheType::kTensorType;
  if (type == ElementType::kFloat32 && random.chance(0.3)) {
    return random.pick({CacheType::kFloat16, CacheType::kBFloat16});
  }
  return random.pick({CacheType::kInt8, CacheType::kFloat8E4M3FN, CacheType::kInt4, CacheType::kFloat4E2M1});
}

void choose_lengths(Random& random, Case& c) {
  c.past.clear();
  c.added.clear();
  const std::int64_t batch = random.chance(0.05) ? 0 : random.between(1, random.chance(0.2) ? 12 : 4);
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t reach = random.pick({0, 3, 20, 70, 300});
    c.past.push_back(random.chance(0.05) ? random.between(500, 1300) : random.between(0, reach));
    c.added.push_back(random.chance(0.15) ? 0 : random.chance(0.5) ? 1 : random.between(1, 40));
  }
  if (random.chance(0.2)) c.padding_tokens = random.between(1, 4);
}

// Large calls cost time and find little that small ones do not: fewer sequences, then smaller blocks, then less to do.
void limit_size(Case& c) {
  constexpr std::int64_t kMaxElements = 400000;
  const auto elements = [&c] {
    std::int64_t longest = 0;
    for (std::int64_t b = 0; b < c.batch_size(); ++b) longest = std::max(longest, c.kv_length(b));
    return (c.batch_size() * (longest / c.block_size + 3) + c.spare_blocks) * c.block_size * c.kv_num_heads *
           c.head_size;
  };
  while (elements() > kMaxElements && c.batch_size() > 1) {
    c.past.pop_back();
    c.added.pop_back();
  }
  while (elements() > kMaxElements && c.block_size > 16) c.block_size /= 2;
  constexpr std::int64_t kMaxProducts = 20000000;
  const auto products = [&c] {
    std::int64_t pairs = 0;
    for (std::int64_t b = 0; b < c.batch_size(); ++b) pairs += c.added[static_cast<std::size_t>(b)] * c.kv_length(b);
    return pairs * c.num_heads * c.head_size;
  };
  while (products() > kMaxProducts) {
    for (std::int64_t& added : c.added) added = (added + 1) / 2;
    for (std::int64_t& past : c.past) past = past * 3 / 4;
  }
}

}  // namespace

Case random_case(std::uint64_t seed) {
  Random random(seed ^ 0x0C7A70u);
  Case c;
  c.seed = seed;
  c.name = "random";
  choose_lengths(random, c);
  c.kv_num_heads = random.between(1, 3);
  c.num_heads = c.kv_num_heads * random.pick({1, 1, 2, 3, 4, 5, 7, 8, 12, 16, 20});
  c.head_size = 8 * random.pick({1, 2, 3, 4, 5, 8, 8, 10, 12, 14, 16, 24, 32});
  c.block_size = random.pick({1, 2, 3, 4, 7, 8, 16, 16, 16, 32, 64, 128, 512});
  c.type = random.pick({ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16});
  c.index_type = random.pick({ElementType::kInt32, ElementType::kInt32, ElementType::kInt64});
  c.spare_blocks = random.between(0, 4);

  c.latent = random.chance(0.2);
  if (c.latent) {
    if (random.chance(0.3)) c.head_size = random.pick({576, 1024, 320});
    c.v_head_size = random.chance(0.2) ? 0 : 8 * random.between(1, c.head_size / 8);
    c.scale = 0.2f;
    c.kv_num_heads = 1;
  } else {
    if (random.chance(0.05)) c.head_size = 512;
    c.packed_qkv = random.chance(0.3);
    c.head_sink = random.chance(0.35);
    c.qk_norm = random.chance(0.25);
    if (random.chance(0.2)) c.scale = static_cast<float>(random.pick({0.05, 0.11, 0.35}));
  }
  limit_size(c);
  const auto granularity = [&random] { return random.pick({QuantType::kPerTensor, QuantType::kPerChannel}); };
  c = with_cache(c, random_format(random, c.type), granularity(), random_format(random, c.type), granularity());

  if (random.chance(0.25)) {
    c.softcap = static_cast<float>(random.pick({0.5, 3.0, 30.0}));
    c.query_magnitude = 2.0;
  }
  if (random.chance(0.15)) {
    c.causal = false;
  } else if (random.chance(0.4)) {
    c.window = random.pick<std::int64_t>({1, 2, 5, c.block_size, c.block_size + 1, 30, 64, 2000});
    c.below_window = random.pick({BelowWindow::kStale, BelowWindow::kUnmapped});
  }
  if (random.chance(0.45)) {
    c.rotary = random.pick({Rotary::kHalf, Rotary::kInterleaved});
    c.rotary_offset = random.chance(0.3) ? 8 * random.below(c.head_size / 8) : 0;
    c.rotary_dim = random.chance(0.5) ? 0 : 2 * random.between(1, (c.head_size - c.rotary_offset) / 2);
  }
  if (random.chance(0.2)) {
    c.qk_output = random.between(1, 2);
    c.output_qk_type = random.pick({ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16});
  }
  c.lse = random.chance(0.3);
  if (random.chance(0.2)) {
    c.bias = random.pick(
        {BiasShape::kFull, BiasShape::kBroadcastBatch, BiasShape::kBroadcastHeads, BiasShape::kBroadcastBoth});
    c.bias_masks = random.chance(0.5);
  }
  c.slots = random.pick(
      {SlotStyle::kAbsent, SlotStyle::kAbsent, SlotStyle::kDerived, SlotStyle::kSomeUnset, SlotStyle::kElsewhere});
  c.positions = random.pick({Positions::kAbsent, Positions::kAbsent, Positions::kSequential, Positions::kTree});
  c.metadata = random.pick({Metadata::kAbsent, Metadata::kTight, Metadata::kLoose, Metadata::kUnknown});
  c.table =
      random.pick({TableStyle::kContiguous, TableStyle::kShuffled, TableStyle::kShuffled, TableStyle::kSharedPrefix});
  if (c.window > 0 && c.positions != Positions::kTree && random.chance(0.5)) c.table = TableStyle::kRing;
  c.unmapped_holes = random.chance(0.15) ? random.between(1, 3) : 0;
  c.cache_order = random.pick({CacheOrder::kTokenMajor, CacheOrder::kHeadMajor, CacheOrder::kKvInterleaved});
  c.key_magnitude = random.pick({1.0, 1.0, 0.1, 5.0});
  c.value_magnitude = random.pick({1.0, 1.0, 0.01, 100.0});
  return c;
}

}  // namespace octavo::testing
