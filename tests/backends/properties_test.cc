// What must hold between runs: independence of bounds, layouts, slots and of memory that nobody may read, bit for bit;
// merging by LSE; extreme scores; one Plan for many runs. (Batches, threads and chunks: invariance_test.cc.)
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "backends/harness.h"
#include "support/case_list.h"
#include "support/codecs.h"
#include "support/executors.h"

namespace octavo::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

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

// "A masked position takes part in nothing": not even an infinite V, of which 0 * V is NaN.
TEST(Infinity, InAValueReachesOnlyTheRowsThatSeeIt) {
  struct Prompt {
    std::int64_t past, added, infinite;  // V of this new token is infinite
    std::int64_t window;
  };
  for (const ElementType type : {ElementType::kFloat32, ElementType::kFloat16}) {
    for (const Prompt& prompt : {Prompt{0, 100, 40, -1}, Prompt{20, 90, 30, 16}, Prompt{1000, 60, 30, -1}}) {
      for (const bool latent : {false, true}) {
        Case spec;
        spec.type = type;
        spec.past = {prompt.past};
        spec.added = {prompt.added};
        spec.window = prompt.window;
        spec.head_sink = !latent;
        spec.latent = latent;
        if (latent) spec.kv_num_heads = 1;
        Call clean(spec), dirty(spec);
        const TensorView& tensor = latent ? dirty.arguments.key : dirty.arguments.value;
        for (std::int64_t c = 0; c < spec.head_size; ++c) {
          dirty.set(tensor, prompt.infinite * tensor.shape[1] + c, kInfinity);
        }
        const Call::Snapshot start = dirty.snapshot();
        for (const std::string& backend : accepting_backends(clean)) {
          run_ok(clean, {.backend = backend});
          dirty.restore(start);
          EXPECT_TRUE(judge(dirty, {.backend = backend}));
          EXPECT_EQ(output_rows(clean, 0, prompt.infinite), output_rows(dirty, 0, prompt.infinite)) << backend;
          const std::int64_t behind = prompt.infinite + prompt.window;
          if (prompt.window > 0) {
            EXPECT_EQ(output_rows(clean, behind, prompt.added), output_rows(dirty, behind, prompt.added)) << backend;
          }
          // A row that sees it: channel 0 of the last token before the window has passed.
          const std::int64_t seeing = prompt.window > 0 ? behind - 1 : prompt.added - 1;
          EXPECT_FALSE(std::isfinite(dirty.get(dirty.arguments.output, seeing * dirty.arguments.output.shape[1])))
              << backend;
        }
      }
    }
  }
}

TEST(Infinity, UnderAMaskingBiasTakesPartInNothing) {
  constexpr std::int64_t kMasked = 2;
  for (const ElementType type : {ElementType::kFloat32, ElementType::kFloat16}) {
    Case spec;
    spec.type = type;
    spec.past = {0, 20};
    spec.added = {70, 3};
    spec.bias = BiasShape::kBroadcastBoth;
    Call call(spec);
    const TensorView& bias = call.arguments.attention_bias;
    for (std::int64_t j = 0; j < bias.shape[2]; ++j) call.set(bias, j * bias.shape[3] + kMasked, -kInfinity);
    const Call::Snapshot finite = call.snapshot();
    for (std::int64_t c = 0; c < spec.kv_num_heads * spec.head_size; ++c) {  // new, and in the past
      call.set(call.arguments.value, kMasked * spec.kv_num_heads * spec.head_size + c, kInfinity);
      store(spec.v_format(),
            call.cache_row(call.arguments.value_cache, call.table_slot(1, kMasked), c / spec.head_size),
            c % spec.head_size, kInfinity);
    }
    const Call::Snapshot infinite = call.snapshot();
    for (const std::string& backend : accepting_backends(call)) {
      call.restore(finite);
      run_ok(call, {.backend = backend});
      const std::vector<std::byte> bits = call.buffer("output").copy();
      call.restore(infinite);
      EXPECT_TRUE(judge(call, {.backend = backend}));
      EXPECT_EQ(call.buffer("output").copy(), bits) << backend << " " << name(type);
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
      again.restore(caches_of(call));
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

// Nothing is loaded for such keys: what an earlier tile of keys left must not be taken for theirs.
TEST(Unmapped, StretchesOfBlocksAddNothing) {
  std::vector<Case> cases = varied_cases();
  Case& int4 = cases.emplace_back();  // whose zero bytes are not zeros
  int4.head_size = 32;
  int4 = with_cache(int4, CacheType::kInt4, QuantType::kPerTensor, CacheType::kInt4, QuantType::kPerTensor);
  for (Case spec : cases) {
    spec.past = {400, 700};
    spec.added = {1, 2};
    spec.window = -1;
    Call call(spec);
    for (std::int64_t position = 120; position < 330; position += spec.block_size) {
      call.set_table(0, position / spec.block_size, -1);
      call.set_table(1, position / spec.block_size + 4, -1);
    }
    for (const std::string& backend : accepting_backends(call)) EXPECT_TRUE(judge(call, {.backend = backend}));
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
