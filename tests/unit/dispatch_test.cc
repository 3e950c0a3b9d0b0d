// Choice, plan and run. Risks: a feature that is silently ignored, a refusal without its reason, memory accessed beyond
// what the plan was made for.
#include <gtest/gtest.h>

#include <array>

#include "dispatch/choose.h"
#include "fake_backends.h"
#include "valid_call.h"

namespace octavo::test {
namespace {

using Base = ValidCall::Base;

Problem problem_with(FeatureSet features, std::int64_t head_size = 64) {
  Problem problem;
  problem.num_heads = problem.kv_num_heads = 1;
  problem.head_size = problem.v_head_size = head_size;
  problem.features = features;
  return problem;
}

constexpr std::array<const dispatch::Backend*, 2> kSpecialists{&kFakeWindow, &kFakeWide};

TEST(Choose, TakesTheFirstThatAccepts) {
  const dispatch::Backend* chosen = nullptr;
  ASSERT_TRUE(choose(problem_with(Feature::kLocalWindow), {}, kSpecialists, chosen).ok());
  EXPECT_STREQ(chosen->name, "fake_window");
  ASSERT_TRUE(choose(problem_with(Feature::kLocalWindow | Feature::kRope), {}, kSpecialists, chosen).ok());
  EXPECT_STREQ(chosen->name, "fake_wide");
}

TEST(Choose, NamesEveryRefusal) {
  const dispatch::Backend* chosen = nullptr;
  const Status status = choose(problem_with(Feature::kHeadSink | Feature::kSoftcap, 8), {}, kSpecialists, chosen);
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_EQ(status.message(),
            "no backend for the cpu takes this call (fake_window: does not support head_sink, softcap; fake_wide: "
            "head_size must be at least 16); the call is legal, drop one of the features named or build octavo with a "
            "backend that has them");
  EXPECT_EQ(chosen, nullptr);
}

TEST(Choose, SaysWhenThereIsNoBackend) {
  const dispatch::Backend* chosen = nullptr;
  const Status status = choose(problem_with({}), {}, {}, chosen);
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_EQ(status.message(),
            "PlanOptions::device: this build of octavo has no backend for the cpu; add one to src/backends.cc");
}

TEST(Choose, LooksAtTheBackendsOfTheDeviceOnly) {
  const dispatch::Backend* chosen = nullptr;
  PlanOptions options;
  options.device = DeviceKind::kCuda;
  const Status status = choose(problem_with({}), options, kSpecialists, chosen);
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  const std::string how_to_get_cuda =
      "PlanOptions::device: this build of octavo has no backend for the cuda; build octavo with -DOCTAVO_CUDA=ON, or "
      "plan for the cpu";
  EXPECT_EQ(status.message(), how_to_get_cuda);
  options.backend = "cuda_general";  // a name that another build has
  EXPECT_EQ(choose(problem_with({}), options, kSpecialists, chosen).message(), how_to_get_cuda);
  EXPECT_EQ(chosen, nullptr);
  EXPECT_TRUE(judge(problem_with({}), DeviceKind::kCuda, kSpecialists).empty());
}

TEST(Choose, TakesTheNamedBackendOrFails) {
  const dispatch::Backend* chosen = nullptr;
  PlanOptions options;
  options.backend = "fake_wide";
  ASSERT_TRUE(choose(problem_with({}), options, kSpecialists, chosen).ok());
  EXPECT_STREQ(chosen->name, "fake_wide");

  options.backend = "fake_window";
  const Status refused = choose(problem_with(Feature::kRope), options, kSpecialists, chosen);
  EXPECT_EQ(refused.code(), StatusCode::kUnsupported);
  EXPECT_EQ(refused.message().find("fake_wide"), std::string::npos) << refused.message();

  options.backend = "cuda";
  const Status unknown = choose(problem_with({}), options, kSpecialists, chosen);
  EXPECT_EQ(unknown.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(
      unknown.message(),
      "PlanOptions::backend: must name a backend for the cpu or be empty, got 'cuda'; this build has fake_window, "
      "fake_wide");
}

TEST(Explain, ListsVerdictsInOrderOfPreference) {
  const std::vector<Verdict> verdicts = explain(problem_with(Feature::kOutputQk));
  ASSERT_EQ(verdicts.size(), 3u);
  EXPECT_EQ(verdicts[0].backend, "fake_window");
  EXPECT_EQ(verdicts[0].refusal, "does not support output_qk");
  EXPECT_EQ(verdicts[1].description, "Wide heads.");
  EXPECT_EQ(verdicts[2].refusal, "");
}

TEST(PlanTest, RefusesALargeOutputQkByBytes) {
  ValidCall call(Base::kFull);
  const Problem problem = call.problem();
  PlanOptions options;
  options.output_qk_limit_bytes = 4 * 5 * 40 * 4;
  Plan made;
  EXPECT_TRUE(plan(problem, options, made).ok());

  options.output_qk_limit_bytes -= 1;
  Plan refused;
  const Status status = plan(problem, options, refused);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(
      status.message(),
      "output_qk: at most 3199 bytes, got 3200 (4 heads * 5 tokens * 40 positions of float32); raise "
      "PlanOptions::output_qk_limit_bytes, pass attention_metadata with a smaller bound of the KV length, or feed "
      "fewer tokens a call");
  EXPECT_FALSE(refused.valid());
}

TEST(PlanTest, SurvivesAnOutputQkBeyond64Bits) {
  Problem problem = problem_with(Feature::kOutputQk);
  problem.qk_output = QkOutput::kScores;
  problem.output_qk_type = ElementType::kFloat32;
  problem.num_heads = 1 << 20;
  problem.token_count = std::int64_t{1} << 31;
  problem.max_context_len = std::int64_t{1} << 40;
  Plan made;
  EXPECT_EQ(plan(problem, {}, made).code(), StatusCode::kResourceExhausted);
}

TEST(PlanTest, SizesTheWorkspaceForItsConcurrency) {
  ValidCall call(Base::kPlain);
  PlanOptions options;
  Plan made;
  ASSERT_TRUE(plan(call.problem(), options, made).ok());
  EXPECT_EQ(made.concurrency(), default_executor().concurrency());

  options.concurrency = 7;
  ASSERT_TRUE(plan(call.problem(), options, made).ok());
  EXPECT_EQ(made.concurrency(), 7);
  EXPECT_EQ(made.workspace_bytes(), 7u * 128u);
  EXPECT_EQ(made.backend_name(), "fake_window");

  options.concurrency = -1;
  EXPECT_EQ(plan(call.problem(), options, made).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Plan().backend_name(), "");
}

class Run : public testing::Test {
 protected:
  Run() : call(Base::kPlain) {
    PlanOptions options;
    options.concurrency = 2;
    EXPECT_TRUE(plan(call.problem(), options, made).ok());
    run_record() = {};
  }
  ValidCall call;
  Plan made;
  alignas(kWorkspaceAlignment) std::array<std::byte, 1024> memory{};
};

TEST_F(Run, HandsTheBackendWhatThePlanSays) {
  ASSERT_TRUE(run(made, call.arguments, {memory.data(), memory.size()}, {&serial_executor()}).ok());
  EXPECT_EQ(run_record().runs, 1);
  EXPECT_EQ(run_record().concurrency, 2);
  EXPECT_EQ(run_record().workspace.data, memory.data());
  EXPECT_EQ(run_record().executor, &serial_executor());

  ASSERT_TRUE(run(made, call.arguments, {memory.data(), memory.size()}, {}).ok());
  EXPECT_EQ(run_record().executor, &default_executor());
}

TEST_F(Run, RefusesAnEmptyPlan) {
  const Status status = run(Plan(), call.arguments, {memory.data(), memory.size()}, {});
  EXPECT_EQ(status.message(), "plan: empty; call octavo::plan() and check its Status first");
}

TEST_F(Run, RefusesAWorkspaceThatIsSmallMissingOrMisaligned) {
  EXPECT_EQ(run(made, call.arguments, {memory.data(), 255}, {}).message(),
            "workspace: must have the plan's 256 bytes, got 255; allocate Plan::workspace_bytes()");
  EXPECT_EQ(run(made, call.arguments, {nullptr, 1024}, {}).message(),
            "workspace: must have the plan's 256 bytes, got 0; allocate Plan::workspace_bytes()");
  EXPECT_EQ(run(made, call.arguments, {memory.data() + 8, 512}, {}).message(),
            "workspace: must be aligned to 64 bytes, got an address that is 8 past a multiple of it; allocate "
            "kWorkspaceAlignment more and take aligned_workspace()");
  EXPECT_EQ(run_record().runs, 0);
}

TEST_F(Run, RefusesAnotherCallsArguments) {
  ValidCall other(Base::kPacked);
  const Status status = run(made, other.arguments, {memory.data(), memory.size()}, {});
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(run_record().runs, 0);
}

TEST_F(Run, TakesCachesThatMovedWithinAStridedPlan) {
  call.arguments.key_cache.strides = {1024, 64, 32, 1};
  call.keys.resize(8 * 1024);
  call.arguments.key_cache.data = call.keys.data();
  Plan strided;
  ASSERT_TRUE(plan(call.problem(), {}, strided).ok());
  std::vector<std::byte> large(strided.workspace_bytes() + kWorkspaceAlignment);
  const Workspace workspace = aligned_workspace(large.data(), large.size());
  EXPECT_TRUE(run(strided, call.arguments, workspace, {}).ok());
  call.arguments.key_cache.set_contiguous_strides();
  EXPECT_TRUE(run(strided, call.arguments, workspace, {}).ok());
}

TEST(Workspaces, AlignedPartLiesInside) {
  alignas(kWorkspaceAlignment) std::array<std::byte, 256> memory{};
  const Workspace inner = aligned_workspace(memory.data() + 1, 255);
  EXPECT_EQ(inner.data, memory.data() + 64);
  EXPECT_EQ(inner.bytes, 192u);
  EXPECT_EQ(aligned_workspace(memory.data() + 1, 10).data, nullptr);
  EXPECT_EQ(aligned_workspace(nullptr, 10).bytes, 0u);
}

TEST(PagedAttention, ValidatesPlansAndRunsWithTheExecutorsConcurrency) {
  ValidCall call(Base::kFull);
  run_record() = {};
  ASSERT_TRUE(paged_attention(call.arguments, call.attributes, {}, {&serial_executor()}).ok());
  EXPECT_EQ(run_record().runs, 1);
  EXPECT_EQ(run_record().concurrency, 1);
  EXPECT_EQ(run_record().workspace.bytes, 128u);

  call.attributes.num_heads = 0;
  EXPECT_EQ(paged_attention(call.arguments, call.attributes).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(run_record().runs, 1);
}

TEST(PagedAttention, RefusesADeviceWhoseMemoryItDoesNotAllocate) {
  ValidCall call(Base::kFull);
  run_record() = {};
  PlanOptions options;
  options.device = DeviceKind::kCuda;
  const Status status = paged_attention(call.arguments, call.attributes, options);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(
      status.message(),
      "PlanOptions::device: paged_attention() allocates host memory and runs on the cpu only; call validate, plan "
      "and run with a workspace on the device");
  EXPECT_EQ(run_record().runs, 0);
}

TEST(Version, IsTheProjects) {
  EXPECT_STREQ(version(), OCTAVO_EXPECTED_VERSION);
}

}  // namespace
}  // namespace octavo::test
