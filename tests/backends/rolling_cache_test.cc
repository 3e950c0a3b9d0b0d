// Risk: with a window, a runtime keeps only ceil(W / block_size) + 1 blocks per sequence and reuses them; a kernel that
// takes a block for one range of positions, or reads below the window, then reads the wrong tokens. At every decode
// step the rolling run must have the bits of the run that keeps everything.
#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>

#include "backends/harness.h"

namespace octavo::testing {
namespace {

struct RollingCase {
  const char* name;
  std::int64_t window;
  std::int64_t block_size;
  BelowWindow below_window;
  void (*setup)(Case& c);
};

void PrintTo(const RollingCase& c, std::ostream* out) {
  *out << c.name;
}

class RollingCache : public ::testing::TestWithParam<RollingCase> {};

TEST_P(RollingCache, HasTheBitsOfTheFullCacheAtEveryStep) {
  const RollingCase& parameters = GetParam();
  constexpr std::int64_t kSteps = 75;
  constexpr std::int64_t kLag = 21;  // the second sequence starts later: one past its window, one not
  Case full;
  full.window = parameters.window;
  full.block_size = parameters.block_size;
  full.below_window = BelowWindow::kStale;
  parameters.setup(full);
  full.table_columns = kSteps / full.block_size + 2;
  Case rolling = full;
  rolling.table = TableStyle::kRing;
  rolling.below_window = parameters.below_window;
  for (const std::string& backend : accepting_backends(Call(full))) {
    Call::Snapshot full_caches, rolling_caches;
    for (std::int64_t step = 0; step < kSteps; ++step) {
      full.past = rolling.past = {step, std::max<std::int64_t>(0, step - kLag)};
      full.added = rolling.added = {1, step < kLag ? 0 : 1};
      Call a(full), b(rolling);
      a.restore(full_caches);
      b.restore(rolling_caches);
      run_ok(a, {.backend = backend});
      ASSERT_TRUE(judge(b, {.backend = backend})) << "step " << step;
      ASSERT_EQ(first_difference(a, b, kOutputs), "") << backend << " at step " << step;
      full_caches = caches_of(a);
      rolling_caches = caches_of(b);
    }
  }
}

std::string test_name(const ::testing::TestParamInfo<RollingCase>& tested) {
  return tested.param.name;
}

INSTANTIATE_TEST_SUITE_P(Windows, RollingCache,
                         ::testing::Values(RollingCase{"plain", 20, 16, BelowWindow::kUnmapped, [](Case&) {}},
                                           RollingCase{"window_of_one", 1, 4, BelowWindow::kUnmapped, [](Case&) {}},
                                           RollingCase{"window_of_a_block", 16, 16, BelowWindow::kStale,
                                                       [](Case& c) { c.type = ElementType::kFloat16; }},
                                           RollingCase{"stale_entries", 9, 4, BelowWindow::kStale,
                                                       [](Case& c) { c.rotary = Rotary::kHalf; }},
                                           RollingCase{"quantized_with_sink", 13, 8, BelowWindow::kUnmapped,
                                                       [](Case& c) {
                                                         c = with_cache(c, CacheType::kInt8, QuantType::kPerChannel,
                                                                        CacheType::kFloat8E4M3FN,
                                                                        QuantType::kPerTensor);
                                                         c.head_sink = true;
                                                       }},
                                           RollingCase{"four_bit", 30, 4, BelowWindow::kUnmapped,
                                                       [](Case& c) {
                                                         c = with_cache(c, CacheType::kInt4, QuantType::kPerChannel,
                                                                        CacheType::kInt4, QuantType::kPerChannel);
                                                       }},
                                           RollingCase{"nothing_evicted", 100, 16, BelowWindow::kUnmapped,
                                                       [](Case&) {}},
                                           RollingCase{"latent", 12, 4, BelowWindow::kUnmapped,
                                                       [](Case& c) {
                                                         c.latent = true;
                                                         c.kv_num_heads = 1;
                                                         c.head_size = 24;
                                                         c.v_head_size = 16;
                                                         c.scale = 0.2f;
                                                       }},
                                           RollingCase{"explicit_slots", 20, 4, BelowWindow::kUnmapped,
                                                       [](Case& c) {
                                                         c.slots = SlotStyle::kDerived;
                                                         c.index_type = ElementType::kInt64;
                                                       }}),
                         test_name);

}  // namespace
}  // namespace octavo::testing
