// Faults that users of paged-attention implementations have reported, each as a test of its kind.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "backends/harness.h"
#include "support/codecs.h"

namespace octavo::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Case quantized(Case c, CacheType format, QuantType granularity) {
  return with_cache(std::move(c), format, granularity, format, granularity);
}

// The sink was dropped on one path only (quantized cache, whole prompt).
TEST(ReportedFault, SinkDroppedInQuantizedPrefill) {
  for (const CacheType format : {CacheType::kInt8, CacheType::kFloat8E4M3FN}) {
    for (const ElementType type : {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16}) {
      Case c;
      c.added = {40, 17};
      c.past = {0, 0};
      c.head_sink = true;  // in [-2, 6]
      c.type = type;
      expect_oracle(quantized(c, format, QuantType::kPerTensor));
    }
  }
}

// The longest query was taken for tokens - batch + 1: an invalid grid, or a token dropped at the edge of a tile.
TEST(ReportedFault, UnevenNewTokens) {
  for (const std::vector<std::int64_t>& added :
       {std::vector<std::int64_t>{10, 0, 0, 0}, {10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, {65, 0}, {0, 65}}) {
    Case c;
    c.added = added;
    c.past.assign(added.size(), 0);
    expect_oracle(c);
    c.past.assign(added.size(), 21);
    c.metadata = Metadata::kTight;
    expect_oracle(c);
  }
}

// The current token left out of the window; decode that ignored the window.
TEST(ReportedFault, WindowOffByOne) {
  constexpr std::int64_t kContext = 70;
  for (const std::int64_t added : {std::int64_t{1}, std::int64_t{30}}) {
    Case c;
    c.past = {kContext - added};
    c.added = {added};
    Call full(c);
    for (const std::int64_t window :
         {std::int64_t{1}, std::int64_t{2}, c.block_size, kContext - 1, kContext, kContext + 1}) {
      c.window = window;
      expect_oracle(c);
      if (window < kContext) continue;
      for (const std::string& backend : accepting_backends(full)) {
        Call windowed(c), unwindowed(full.spec());
        run_ok(windowed, {.backend = backend});
        run_ok(unwindowed, {.backend = backend});
        EXPECT_EQ(first_difference(windowed, unwindowed, kOutputs), "") << backend << " window " << window;
      }
    }
  }
}

// -inf went through tanh and became -softcap, so that a masked column leaked.
TEST(ReportedFault, SoftcapOfAMaskingBias) {
  for (const ElementType type : {ElementType::kFloat32, ElementType::kBFloat16}) {
    Case c;
    c.past = {0, 20};
    c.added = {6, 1};
    c.type = type;
    c.softcap = 2.0f;
    c.bias = BiasShape::kBroadcastBoth;
    Call call(c);
    const TensorView& bias = call.arguments.attention_bias;
    for (std::int64_t j = 0; j < bias.shape[2]; ++j) call.set(bias, j * bias.shape[3] + 2, -kInfinity);
    const Call::Snapshot usual = call.snapshot();
    for (const std::string& backend : accepting_backends(call)) {
      call.restore(usual);
      EXPECT_TRUE(judge(call, {.backend = backend}));
      const std::vector<std::byte> output = call.buffer("output").copy();
      // Column 2 contributes exactly nothing: its V may be anything finite. For token 2 itself V comes from `value`.
      call.restore(usual);
      for (std::int64_t i = 0; i < c.kv_num_heads * c.head_size; ++i) {
        call.set(call.arguments.value, 2 * c.kv_num_heads * c.head_size + i, 1e30);
      }
      for (std::int64_t g = 0; g < c.kv_num_heads; ++g) {
        for (std::int64_t channel = 0; channel < c.head_size; ++channel) {
          store(c.v_format(), call.cache_row(call.arguments.value_cache, call.table_slot(1, 2), g), channel, 1e30);
        }
      }
      run_ok(call, {.backend = backend});
      EXPECT_EQ(call.buffer("output").copy(), output) << backend;
    }
  }
}

// Block ids out of range were followed; a table without columns made a grid of size zero.
TEST(ReportedFault, WildBlockIdsAndATableWithoutColumns) {
  for (const std::int64_t id : {std::int64_t{-7}, std::int64_t{1} << 30}) {
    Case c;
    c.past = {40};
    Call call(c);
    call.set_table(0, 1, id);
    expect_refusal(call, StatusCode::kInvalidArgument, {"block_table[0, 1]"});
  }
  Case empty;
  empty.past = {0, 0, 0};
  empty.added = {0, 0, 0};
  empty.table_columns = -1;
  expect_oracle(empty);
  empty.padding_tokens = 4;
  expect_oracle(empty);
}

// A row of a captured graph that serves no request: length 0, table all -1, slots -1.
TEST(ReportedFault, PaddedRowsOfACapturedGraph) {
  for (const bool latent : {false, true}) {
    Case c;
    c.past = {40, 0, 0, 0};
    c.added = {1, 1, 1, 0};
    c.slots = SlotStyle::kDerived;
    c.lse = true;
    c.padding_tokens = 1;
    if (latent) {
      c.latent = true;
      c.kv_num_heads = 1;
    } else {
      c.head_sink = true;
    }
    Call call(c);
    for (std::int64_t b = 1; b < 4; ++b) {
      for (std::int64_t column = 0; column < call.arguments.block_table.shape[1]; ++column)
        call.set_table(b, column, -1);
    }
    for (std::int64_t t = 1; t < 4; ++t) call.set_slot(t, -1);
    const std::int64_t width = call.arguments.output.shape[1];
    const Call::Snapshot start = call.snapshot();
    for (const std::string& backend : accepting_backends(call)) {
      call.restore(start);
      EXPECT_TRUE(judge(call, {.backend = backend}));
      for (std::int64_t i = width; i < 4 * width; ++i) ASSERT_EQ(call.get(call.arguments.output, i), 0.0) << backend;
    }
  }
}

// 0 * NaN entered the output from the tail of the last page. UnreadMemory in properties_test.cc has the bits for every
// feature; here every length within a page, prefill and decode.
TEST(ReportedFault, NaNBehindTheLastToken) {
  for (std::int64_t length = 1; length <= 17; ++length) {
    for (const CacheOrder order : {CacheOrder::kTokenMajor, CacheOrder::kKvInterleaved}) {
      Case c;
      c.past = {length - 1, 0};
      c.added = {1, length};
      c.cache_order = order;
      expect_oracle(c);
    }
  }
}

// 32-bit offsets wrapped in a pool of more than 2^31 elements.
TEST(ReportedFault, PoolBeyond32BitOffsets) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the sanitizer's shadow of so large a mapping costs more than the test";
#endif
  for (const CacheType format : {CacheType::kTensorType, CacheType::kInt8}) {
    Case c = quantized(Case{}, format, QuantType::kPerTensor);
    c.head_size = 64;
    c.num_heads = c.kv_num_heads = 32;
    c.past = {37};
    c.added = {2};
    Call small(c);
    constexpr std::int64_t kBlocks = 70001;
    const std::int64_t block_elements = c.block_size * c.kv_num_heads * c.head_size;
    ASSERT_GT(kBlocks * block_elements, std::int64_t{1} << 31);
    const auto block_bytes = static_cast<std::size_t>(block_elements) * size_in_bytes(small.arguments.key_cache.type);
    const std::size_t bytes = static_cast<std::size_t>(kBlocks) * block_bytes;
    std::byte* pools[2];
    for (std::byte*& pool : pools) {
      void* mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (mapping == MAP_FAILED) GTEST_SKIP() << "no address space for " << bytes << " bytes";
      pool = static_cast<std::byte*>(mapping);
    }
    for (const std::string& backend : accepting_backends(small)) {
      Call large(c);
      run_ok(small, {.backend = backend});
      const std::int64_t blocks = large.arguments.key_cache.shape[0];
      MutableTensorView* const caches[2] = {&large.arguments.key_cache, &large.arguments.value_cache};
      for (int i = 0; i < 2; ++i) {
        std::memcpy(pools[i] + static_cast<std::size_t>(kBlocks - blocks) * block_bytes, caches[i]->data,
                    static_cast<std::size_t>(blocks) * block_bytes);
        caches[i]->data = pools[i];
        caches[i]->shape[0] = kBlocks;
      }
      for (std::int64_t column = 0; column < 3; ++column) {
        large.set_table(0, column, large.table(0, column) + kBlocks - blocks);
      }
      run_ok(large, {.backend = backend});
      EXPECT_EQ(large.buffer("output").copy(), small.buffer("output").copy()) << backend;
      const std::int64_t written = large.table_slot(0, 38);
      EXPECT_EQ(0, std::memcmp(large.cache_row(large.arguments.key_cache, written, 0),
                               small.cache_row(small.arguments.key_cache, small.table_slot(0, 38), 0),
                               static_cast<std::size_t>(c.head_size)));
    }
    for (std::byte* pool : pools) munmap(pool, bytes);
  }
}

// A slot_mapping shorter than the tokens was read past its end. (-1 slots: Slots in properties_test.cc; two tokens on
// one slot: refusals_test.cc.)
TEST(ReportedFault, SlotMappingShorterThanTheTokens) {
  Case c;
  c.added = {9};
  c.slots = SlotStyle::kDerived;
  Call call(c);
  call.arguments.slot_mapping.shape[0] = 5;
  expect_refusal(call, StatusCode::kInvalidArgument, {"slot_mapping", "9", "5"});
}

// A finite sentinel for "masked" beat valid scores near -6e4; a piece of work in which all is masked gave NaN.
TEST(ReportedFault, ScoresBelowAMaskSentinel) {
  Case c;
  c.past = {700};
  c.added = {2};
  c.type = ElementType::kFloat16;
  c.unmapped_holes = 15;
  c.head_sink = true;
  c.sink_low = -60010.0;
  c.sink_high = -59990.0;
  c.bias = BiasShape::kBroadcastBoth;
  expect_oracle(c, [](Call& call) {
    const TensorView& bias = call.arguments.attention_bias;
    for (std::int64_t i = 0; i < bias.element_count(); ++i) {
      const double value = call.get(bias, i);
      if (!std::isnan(value)) call.set(bias, i, i % bias.shape[3] < 512 ? -kInfinity : -60000.0);
    }
  });
}

// Group sizes past 8 gave wrong results; head sizes 80, 96, 112 were refused.
TEST(ReportedFault, UnusualGroupsAndHeadSizes) {
  for (const std::int64_t group : {5, 6, 7, 12, 16, 20}) {
    for (const std::int64_t head_size : {80, 96, 112}) {
      Case c;
      c.kv_num_heads = 1;
      c.num_heads = group;
      c.head_size = head_size;
      c.past = {0, 65};
      c.added = {9, 1};
      expect_oracle(c);
      expect_oracle(quantized(c, CacheType::kFloat8E4M3FN, QuantType::kPerTensor));
    }
  }
}

// Only part of the context was attended.
TEST(ReportedFault, LargeBlocksAndALongContext) {
  for (const std::int64_t added : {1, 3}) {
    Case c;
    c.block_size = 512;
    c.past = {4700, 513};
    c.added = {added, 1};
    c.num_heads = 2;
    c.kv_num_heads = 1;
    c.lse = true;
    expect_oracle(c);
  }
}

// With one KV head the stride over heads means nothing, and a caller may leave anything there; caches are often views
// into larger tensors.
TEST(ReportedFault, DegenerateAndPaddedStrides) {
  for (const std::int64_t head_stride : {0, 1, 16, 12345}) {
    Case c;
    c.kv_num_heads = 1;
    c.past = {40, 3};
    c.added = {1, 20};
    expect_oracle(c, [head_stride](Call& call) {
      call.arguments.key_cache.strides[2] = head_stride;
      call.arguments.value_cache.strides[2] = head_stride;
    });
  }
  // Every second block of a pool: K and V of two layers side by side.
  Case c;
  c.past = {40, 3};
  c.added = {1, 20};
  c.spare_blocks = 40;
  c.table = TableStyle::kContiguous;
  const Call whole(c);
  ASSERT_EQ(whole.arguments.block_table.shape[1], 5);
  for (const std::string& backend : accepting_backends(whole)) {
    Call view(c), plain(c);
    run_ok(plain, {.backend = backend});
    for (MutableTensorView* cache : {&view.arguments.key_cache, &view.arguments.value_cache}) {
      // The ten blocks of the table move to the even blocks of the pool.
      const auto bytes = static_cast<std::size_t>(cache->strides[0]) * size_in_bytes(cache->type);
      auto* pool = static_cast<std::byte*>(cache->data);
      for (std::size_t block = 10; block-- > 0;) std::memmove(pool + 2 * block * bytes, pool + block * bytes, bytes);
      cache->strides[0] *= 2;
      cache->shape[0] /= 2;
    }
    run_ok(view, {.backend = backend});
    EXPECT_EQ(first_difference(plain, view, kOutputs), "") << backend;
  }
}

// fp8 saturation differed between write paths. (NaN in K: NaN in properties_test.cc.)
TEST(ReportedFault, Fp8ValuesPastTheLargest) {
  for (const ElementType type : {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16}) {
    for (const bool prologue : {false, true}) {
      for (const QuantType granularity : {QuantType::kPerTensor, QuantType::kPerChannel}) {
        Case c;
        c.past = {0, 30};
        c.added = {20, 1};
        c.type = type;
        c.qk_norm = prologue;
        c.rotary = prologue ? Rotary::kHalf : Rotary::kNone;
        c = quantized(c, CacheType::kFloat8E4M3FN, granularity);
        expect_oracle(c, [](Call& call) {
          for (const TensorView& scale : {call.arguments.k_scale, call.arguments.v_scale}) {
            for (std::int64_t i = 0; i < scale.element_count(); ++i) call.set(scale, i, 0.001);  // 448 * 0.001 < 1
          }
        });
      }
    }
  }
}

// Entries of the table were taken for unique: ring tables repeat them, and a prefix is shared.
TEST(ReportedFault, RepeatedTableEntries) {
  Case c;
  c.past = {100, 90};
  c.added = {1, 7};
  c.window = 21;
  c.table = TableStyle::kRing;
  for (const BelowWindow below : {BelowWindow::kStale, BelowWindow::kUnmapped}) {
    c.below_window = below;
    expect_oracle(c);
    expect_oracle(quantized(c, CacheType::kInt8, QuantType::kPerTensor));
  }
  Case shared;
  shared.table = TableStyle::kSharedPrefix;
  shared.past = {64, 70, 100, 65};
  shared.added = {1, 1, 5, 1};
  expect_oracle(shared);
  // The same block twice in one row: both its columns are positions of their own.
  Case twice;
  twice.past = {48};
  twice.added = {1};
  expect_oracle(twice, [](Call& call) { call.set_table(0, 1, call.table(0, 0)); });
}

}  // namespace
}  // namespace octavo::testing
