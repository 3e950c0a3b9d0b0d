// What must hold between runs, bit for bit: batch invariance, independence of threads, bounds, layouts and of memory
// that nobody may read.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include "backends/harness.h"
#include "support/case_list.h"
#include "support/codecs.h"
#include "support/executors.h"
#include "support/random.h"

namespace octavo::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Cases with different kernels behind them: plain, quantized with everything, windowed, LATENT.
std::vector<Case> varied_cases() {
  Case plain;
  plain.name = "plain";
  plain.head_size = 32;
  plain.lse = true;

  Case quantized =
      with_cache(plain, CacheType::kInt8, QuantType::kPerChannel, CacheType::kFloat8E4M3FN, QuantType::kPerTensor);
  quantized.name = "quantized";
  quantized.head_sink = quantized.qk_norm = true;
  quantized.rotary = Rotary::kHalf;
  quantized.softcap = 5.0f;

  Case windowed;
  windowed.name = "windowed";
  windowed.type = ElementType::kBFloat16;
  windowed.window = 37;
  windowed.head_sink = true;
  windowed.bias = BiasShape::kBroadcastBatch;

  Case four_bit =
      with_cache(plain, CacheType::kInt4, QuantType::kPerChannel, CacheType::kFloat4E2M1, QuantType::kPerTensor);
  four_bit.name = "four_bit";
  four_bit.type = ElementType::kFloat16;
  four_bit.packed_qkv = true;

  Case latent;
  latent.name = "latent";
  latent.latent = true;
  latent.num_heads = 6;
  latent.kv_num_heads = 1;
  latent.head_size = 72;
  latent.v_head_size = 64;
  latent.scale = 0.1f;
  return {plain, quantized, windowed, four_bit, latent};
}

// Bits of the output of `spec` on `backend`.
std::vector<std::byte> output_bits(const Case& spec, const RunSettings& settings) {
  Call call(spec);
  run_ok(call, settings);
  return call.buffer("output").copy();
}

TEST(BatchInvariance, SameBitsAloneAndAmong300) {
  for (Case batch : varied_cases()) {
    batch.past.clear();
    batch.added.clear();
    for (std::int64_t b = 0; b < 300; ++b) {
      batch.past.push_back(b * 37 % 150);
      batch.added.push_back(b % 17 == 0 ? 9 : b % 13 == 0 ? 0 : 1);
    }
    batch.past[150] = 1030;
    batch.added[151] = 70;
    Call together(batch);
    for (const std::string& backend : accepting_backends(together)) {
      run_ok(together, {.backend = backend});
      std::int64_t begin = 0;
      for (std::int64_t b = 0; b < 300; ++b) {
        const auto i = static_cast<std::size_t>(b);
        const std::int64_t end = begin + batch.added[i];
        if (b % 23 == 0 || b == 150 || b == 151) {
          Case alone = batch;
          alone.past = {batch.past[i]};
          alone.added = {batch.added[i]};
          alone.identities = {b};
          EXPECT_EQ(output_bits(alone, {.backend = backend}), output_rows(together, begin, end))
              << backend << ": sequence " << b << " of " << batch.name << " has other bits alone";
        }
        begin = end;
      }
    }
  }
}

TEST(BatchInvariance, SameBitsAtAnyPlaceInTheBatch) {
  for (Case spec : varied_cases()) {
    spec.past = {40, 0, 7};
    spec.added = {1, 12, 3};
    spec.identities = {0, 1, 2};
    Case turned = spec;
    turned.past = {7, 40, 0};
    turned.added = {3, 1, 12};
    turned.identities = {2, 0, 1};
    Call a(spec), b(turned);
    for (const std::string& backend : accepting_backends(a)) {
      run_ok(a, {.backend = backend});
      run_ok(b, {.backend = backend});
      EXPECT_EQ(output_rows(a, 13, 16), output_rows(b, 0, 3)) << backend << " " << spec.name;
      EXPECT_EQ(output_rows(a, 0, 13), output_rows(b, 3, 16)) << backend << " " << spec.name;
    }
  }
}

TEST(Threads, SameBitsForAnyExecutor) {
  for (Case spec : varied_cases()) {
    spec.past = {0, 700, 2300, 15};
    spec.added = {90, 1, 1, 5};
    Call serial(spec), other(spec);
    const Call::Snapshot start = other.snapshot();
    for (const std::string& backend : accepting_backends(serial)) {
      serial.restore(start);
      run_ok(serial, {.backend = backend});
      std::vector<std::unique_ptr<Executor>> executors;
      for (const int threads : {1, 2, 3, 7}) {
        executors.push_back(std::make_unique<ReverseExecutor>(threads));
        executors.push_back(std::make_unique<ShufflingExecutor>(threads, 11));
      }
      std::vector<Executor*> all = {&default_executor()};
      for (const auto& executor : executors) all.push_back(executor.get());
      for (Executor* executor : all) {
        other.restore(start);
        run_ok(other, {.backend = backend, .executor = executor});
        EXPECT_EQ(first_difference(serial, other, kAllResults), "")
            << backend << " " << spec.name << " with concurrency " << executor->concurrency();
      }
    }
  }
}

TEST(Threads, AnExecutorOtherThanThePlansIsSafe) {
  for (Case spec : varied_cases()) {
    spec.past = {0, 700, 15};
    spec.added = {40, 1, 5};
    Call expected(spec), call(spec);
    const Call::Snapshot start = call.snapshot();
    Problem problem;
    ASSERT_TRUE(validate(call.arguments, call.attributes, problem).ok());
    for (const std::string& backend : accepting_backends(call)) {
      expected.restore(start);
      run_ok(expected, {.backend = backend});
      for (const auto& [planned, actual] : {std::pair{1, 7}, {7, 1}, {2, 3}}) {
        PlanOptions options;
        options.backend = backend;
        options.concurrency = planned;
        Plan decision;
        ASSERT_TRUE(plan(problem, options, decision).ok());
        GuardedBuffer workspace(decision.workspace_bytes(), kWorkspaceAlignment);
        ShufflingExecutor executor(actual, 3);
        RunContext context;
        context.executor = &executor;
        call.restore(start);
        const Status status =
            octavo::run(decision, call.arguments, Workspace{workspace.data(), workspace.size()}, context);
        EXPECT_TRUE(status.ok()) << status.message();
        EXPECT_TRUE(workspace.intact()) << backend << " planned for " << planned << ", ran on " << actual;
        EXPECT_EQ(first_difference(expected, call, kAllResults), "") << backend << " " << spec.name;
      }
    }
  }
}

TEST(Chunks, ChunkedPrefillLeavesTheSameCachesAndOutputs) {
  constexpr std::int64_t kLength = 150;
  for (Case spec : varied_cases()) {
    spec.table_columns = 12;
    spec.past = {0};
    spec.added = {kLength};
    Call whole(spec);
    for (const std::string& backend : accepting_backends(whole)) {
      run_ok(whole, {.backend = backend});
      Call::Snapshot caches;
      std::int64_t done = 0;
      for (const std::int64_t chunk : {1, 63, 17, 64, 5}) {
        Case part = spec;
        part.past = {done};
        part.added = {chunk};
        Call call(part);
        call.restore(caches);
        // Against the oracle: how queries share a tile may depend on the chunk, so bits may differ.
        EXPECT_TRUE(judge(call, {.backend = backend})) << "chunk at " << done;
        caches.clear();
        for (const char* cache : {"key_cache", "value_cache"}) {
          if (call.has_buffer(cache)) caches.emplace(cache, call.buffer(cache).copy());
        }
        done += chunk;
        if (done == kLength) {
          EXPECT_EQ(first_difference(whole, call, {"key_cache", "value_cache"}), "") << backend << " " << spec.name;
        }
      }
    }
  }
}

TEST(Metadata, BoundsNeverChangeBits) {
  for (Case spec : varied_cases()) {
    spec.past = {0, 70, 1100};
    spec.added = {33, 1, 2};
    Call absent(spec);
    const Call::Snapshot start = absent.snapshot();
    for (const std::string& backend : accepting_backends(absent)) {
      absent.restore(start);
      run_ok(absent, {.backend = backend});
      for (const Metadata metadata : {Metadata::kTight, Metadata::kLoose, Metadata::kUnknown}) {
        Case bounded = spec;
        bounded.metadata = metadata;
        Call call(bounded);
        run_ok(call, {.backend = backend});
        EXPECT_EQ(first_difference(absent, call, {"output", "lse", "key_cache", "value_cache"}), "")
            << backend << " " << to_string(bounded);
      }
    }
  }
}

TEST(Metadata, TooSmallBoundsStayInsideTheBuffers) {
  for (Case spec : varied_cases()) {
    spec.past = {0, 70, 300};
    spec.added = {33, 1, 2};
    spec.metadata = Metadata::kTight;
    Call call(spec);
    call.int32_at("attention_metadata", 0) = 1;
    call.int32_at("attention_metadata", 1) = 17;
    call.int32_at("attention_metadata", 2) = 0;
    for (const std::string& backend : accepting_backends(call)) {
      const Status status = run(call, {.backend = backend});  // a wrong number and an error are both allowed
      EXPECT_NE(static_cast<int>(status.code()), static_cast<int>(StatusCode::kInternal)) << status.message();
      EXPECT_EQ(call.broken_guards(), "") << backend;
    }
  }
}

TEST(UnreadMemory, ItsContentsNeverChangeABit) {
  std::vector<Case> cases = single_feature_cases();
  const std::vector<Case> sizes = size_cases();
  cases.insert(cases.end(), sizes.begin(), sizes.end());
  for (const Case& spec : cases) {
    Case benign = spec;
    benign.hostile = false;
    Call a(spec), b(benign);
    const Call::Snapshot with_nan = a.snapshot(), with_zeros = b.snapshot();
    for (const std::string& backend : accepting_backends(a)) {
      a.restore(with_nan);
      b.restore(with_zeros);
      run_ok(a, {.backend = backend});
      run_ok(b, {.backend = backend});
      EXPECT_EQ(first_difference(a, b, kOutputs), "") << backend << " " << to_string(spec);
    }
  }
}

TEST(NaN, StaysInItsOwnSequence) {
  for (Case spec : varied_cases()) {
    spec.past = {20, 33, 5};
    spec.added = {3, 2, 6};
    Call clean(spec);
    for (const std::string& backend : accepting_backends(clean)) {
      Call dirty(spec);
      for (const TensorView& tensor : {dirty.arguments.query, dirty.arguments.key, dirty.arguments.value}) {
        if (!tensor.present()) continue;
        for (std::int64_t i = 3 * tensor.shape[1]; i < 5 * tensor.shape[1]; ++i) dirty.set(tensor, i, kNaN);
      }
      for (std::int64_t c = 0; c < spec.head_size; ++c) {  // and in its past
        const std::int64_t slot = dirty.table_slot(1, 30);
        store_code(spec.k_format(), dirty.cache_row(dirty.arguments.key_cache, slot, 0), c,
                   poison_code(spec.k_format(), static_cast<std::uint64_t>(c)));
      }
      run_ok(clean, {.backend = backend});
      run_ok(dirty, {.backend = backend});
      EXPECT_EQ(output_rows(clean, 0, 3), output_rows(dirty, 0, 3)) << backend << " " << spec.name;
      EXPECT_EQ(output_rows(clean, 5, 11), output_rows(dirty, 5, 11)) << backend << " " << spec.name;
    }
  }
}

TEST(Slots, MinusOneLeavesEveryByte) {
  for (Case spec : varied_cases()) {
    spec.past = {20, 0};
    spec.added = {3, 9};
    spec.slots = SlotStyle::kDerived;
    Call call(spec);
    for (const std::string& backend : accepting_backends(call)) {
      run_ok(call, {.backend = backend});  // fills the caches
      Call again(spec);
      Call::Snapshot caches;
      for (const char* cache : {"key_cache", "value_cache"}) {
        if (call.has_buffer(cache)) caches.emplace(cache, call.buffer(cache).copy());
      }
      again.restore(caches);
      for (std::int64_t t = 0; t < spec.token_count(); ++t) again.set_slot(t, -1);
      run_ok(again, {.backend = backend});
      // A prefix-cache hit: nothing written, and the same output as the run that wrote it.
      EXPECT_EQ(first_difference(call, again, kAllResults), "") << backend << " " << spec.name;
    }
  }
}

TEST(Slots, ExplicitOnesEqualDerivedOnes) {
  for (Case spec : varied_cases()) {
    spec.past = {20, 0};
    spec.added = {3, 9};
    Case explicit_slots = spec;
    explicit_slots.slots = SlotStyle::kDerived;
    for (const std::string& backend : accepting_backends(Call(spec))) {
      Call a(spec), b(explicit_slots);
      run_ok(a, {.backend = backend});
      run_ok(b, {.backend = backend});
      EXPECT_EQ(first_difference(a, b, kAllResults), "") << backend << " " << spec.name;
    }
  }
}

TEST(Layout, TheOrderOfTheCacheAndTheIndexTypeChangeNoBit) {
  for (Case spec : varied_cases()) {
    spec.past = {20, 0, 64};
    spec.added = {3, 9, 1};
    for (const std::string& backend : accepting_backends(Call(spec))) {
      const std::vector<std::byte> bits = output_bits(spec, {.backend = backend});
      for (const CacheOrder order : {CacheOrder::kHeadMajor, CacheOrder::kKvInterleaved}) {
        Case other = spec;
        other.cache_order = order;
        EXPECT_EQ(output_bits(other, {.backend = backend}), bits) << backend << " " << to_string(other);
      }
      Case other = spec;
      other.index_type = ElementType::kInt64;
      EXPECT_EQ(output_bits(other, {.backend = backend}), bits) << backend << " " << to_string(other);
    }
  }
}

TEST(Lse, PartsMergeToTheWhole) {
  // Attention over the first pages and over the rest, merged by their LSE, is attention over all; the sink joins once.
  Case spec;
  spec.past = {64};
  spec.added = {1};
  spec.lse = true;
  spec.head_size = 32;
  for (const std::string& backend : accepting_backends(Call(spec))) {
    Call whole(spec), first(spec), second(spec);
    for (std::int64_t column = 0; column < 5; ++column) (column < 2 ? second : first).set_table(0, column, -1);
    for (Call* call : {&whole, &first, &second}) run_ok(*call, {.backend = backend});
    for (std::int64_t h = 0; h < spec.num_heads; ++h) {
      const double a = first.get(first.arguments.lse, h), b = second.get(second.arguments.lse, h);
      const double lse = std::max(a, b) + std::log1p(std::exp(-std::fabs(a - b)));
      EXPECT_NEAR(whole.get(whole.arguments.lse, h), lse, 2e-6);
      for (std::int64_t c = 0; c < spec.head_size; ++c) {
        const std::int64_t i = h * spec.head_size + c;
        const double merged = std::exp(a - lse) * first.get(first.arguments.output, i) +
                              std::exp(b - lse) * second.get(second.arguments.output, i);
        EXPECT_NEAR(whole.get(whole.arguments.output, i), merged, 2e-6);
      }
    }
  }
}

TEST(Softmax, ExtremeScores) {
  for (const ElementType type : {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16}) {
    for (const double magnitude : {0.0, 1e-4, 30.0, 3000.0}) {
      for (const double sink : {-3e4, 0.0, 3e4}) {
        Case spec;
        spec.past = {0, 70, 300};
        spec.added = {20, 1, 1};
        spec.type = type;
        spec.query_magnitude = magnitude;
        spec.key_magnitude = magnitude > 100.0 ? 10.0 : 1.0;
        spec.head_sink = true;
        spec.sink_low = sink - 10.0;
        spec.sink_high = sink + 10.0;
        spec.lse = true;
        expect_oracle(spec);
      }
    }
  }
}

TEST(Softmax, EveryScoreFarBelowZero) {
  // Scores near -6e4, where a finite sentinel for "masked" would win.
  Case spec;
  spec.past = {40};
  spec.added = {3};
  spec.bias = BiasShape::kFull;
  spec.lse = true;
  for (const ElementType type : {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16}) {
    spec.type = type;
    expect_oracle(spec, [](Call& call) {
      for (std::int64_t i = 0; i < call.arguments.attention_bias.element_count(); ++i) {
        const double value = call.get(call.arguments.attention_bias, i);
        if (!std::isnan(value)) call.set(call.arguments.attention_bias, i, -60000.0 + 8.0 * value);
      }
    });
  }
}

TEST(Softmax, RowsThatAttendToNothingAreZero) {
  for (const ElementType type : {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16}) {
    Case spec;
    spec.type = type;
    spec.past = {32, 0};
    spec.added = {2, 4};
    spec.lse = true;
    spec.qk_output = 1;
    spec.head_sink = true;
    spec.bias = BiasShape::kFull;
    spec.slots = SlotStyle::kDerived;
    Call call(spec);
    for (std::int64_t t = 0; t < 2; ++t) call.set_slot(t, -1);
    for (std::int64_t column = 0; column < 3; ++column) call.set_table(0, column, -1);  // nothing is mapped
    for (std::int64_t i = call.arguments.attention_bias.element_count() / 2;
         i < call.arguments.attention_bias.element_count(); ++i) {
      call.set(call.arguments.attention_bias, i, -kInfinity);  // everything is at -inf
    }
    const Call::Snapshot start = call.snapshot();
    for (const std::string& backend : accepting_backends(call)) {
      call.restore(start);
      EXPECT_TRUE(judge(call, {.backend = backend}));
      for (std::int64_t i = 0; i < call.arguments.output.element_count(); ++i) {
        ASSERT_EQ(call.get(call.arguments.output, i), 0.0) << backend << " element " << i;
      }
      for (std::int64_t i = 0; i < call.arguments.lse.element_count(); ++i) {
        ASSERT_EQ(call.get(call.arguments.lse, i), -kInfinity) << backend << " element " << i;
      }
    }
  }
}

TEST(Plan, ServesGrowingLengthsAndConcurrentRuns) {
  // One Plan, kept while lengths grow; and two runs of it at once, each with its own workspace.
  Case spec;
  spec.past = {100, 90};
  spec.added = {1, 1};
  spec.table_columns = 40;
  Call first(spec);
  Problem problem;
  ASSERT_TRUE(validate(first.arguments, first.attributes, problem).ok());
  for (const std::string& backend : accepting_backends(first)) {
    Plan kept;
    PlanOptions options;
    options.backend = backend;
    options.concurrency = 2;
    ASSERT_TRUE(plan(problem, options, kept).ok());
    for (const std::int64_t past : {100, 300, 600}) {
      spec.past = {past, past / 2};
      Call a(spec), b(spec), fresh(spec);
      run_ok(fresh, {.backend = backend});
      GuardedBuffer workspaces[2] = {GuardedBuffer(kept.workspace_bytes(), kWorkspaceAlignment),
                                     GuardedBuffer(kept.workspace_bytes(), kWorkspaceAlignment)};
      Call* const calls[2] = {&a, &b};
      struct Pair {
        Call* const* calls;
        GuardedBuffer* workspaces;
        const Plan& plan;
        bool ok[2];
      } pair{calls, workspaces, kept, {false, false}};
      ShufflingExecutor two(2, 5);
      two.parallel_for(
          2,
          [](void* context, std::int64_t i) {
            auto& p = *static_cast<Pair*>(context);
            ReverseExecutor executor(2);
            RunContext run_context;
            run_context.executor = &executor;
            const Workspace workspace{p.workspaces[i].data(), p.workspaces[i].size()};
            p.ok[i] = octavo::run(p.plan, p.calls[i]->arguments, workspace, run_context).ok();
          },
          &pair);
      for (int i = 0; i < 2; ++i) {
        EXPECT_TRUE(pair.ok[i] && workspaces[i].intact());
        EXPECT_EQ(first_difference(fresh, *calls[i], kAllResults), "") << backend << " at " << past;
      }
    }
  }
}

}  // namespace
}  // namespace octavo::testing
