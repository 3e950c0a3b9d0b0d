// Differential fuzzing: random legal Cases, in hostile memory, on a CPU backend and on every CUDA backend that takes
// them. Both are held to the oracle's bounds, so the two cannot differ by more than the two bounds together; besides,
// whether a row attends to anything at all, and what caches of a format without rounding hold, must be equal.
//   octavo_cuda_test --gtest_filter=CudaFuzz.* [--fuzz_seed=S] [--fuzz_cases=N]
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>

#include "cuda/device_call.h"
#include "cuda/fuzz_flags.h"
#include "support/call.h"
#include "support/case_list.h"
#include "support/codecs.h"
#include "support/random.h"
#include "support/run.h"

namespace octavo::testing {
namespace {

// Element by element: both attend to something or neither does, and both have a number or neither does.
std::string first_disagreement(Call& cpu, Call& cuda) {
  for (const MutableTensorView* view : {&cpu.arguments.output, &cpu.arguments.lse, &cpu.arguments.output_qk}) {
    if (!view->present()) continue;
    const MutableTensorView& other = view == &cpu.arguments.output ? cuda.arguments.output
                                     : view == &cpu.arguments.lse  ? cuda.arguments.lse
                                                                   : cuda.arguments.output_qk;
    for (std::int64_t i = 0; i < view->element_count(); ++i) {
      const double a = cpu.get(*view, i);
      const double b = cuda.get(other, i);
      if (std::isfinite(a) == std::isfinite(b) && std::isnan(a) == std::isnan(b)) continue;
      return "element " + std::to_string(i) + " is " + std::to_string(a) + " on the CPU and " + std::to_string(b);
    }
  }
  return {};
}

// Rows of K and V that go through no float32 arithmetic: the bytes of both devices are the same.
bool stores_exactly(const Case& spec) {
  return !spec.qk_norm && spec.rotary == Rotary::kNone;
}

void run_case(std::uint64_t seed) {
  const Case spec = random_case(seed);
  Call cpu(spec);
  const Call::Snapshot start = cpu.snapshot();
  const Acceptance acceptance = ask_backends(cpu);
  ASSERT_TRUE(acceptance.status.ok()) << acceptance.status.message() << "\n" << to_string(spec);
  ASSERT_FALSE(acceptance.accepting.empty()) << to_string(spec);
  const Status status = run(cpu, {.backend = acceptance.accepting.front()});
  ASSERT_TRUE(status.ok()) << status.message() << "\n" << to_string(spec);
  const Report report = compare(cpu, start);
  ASSERT_TRUE(report.ok()) << acceptance.accepting.front() << " differs from the oracle in " << to_string(spec) << "\n"
                           << report.text();

  Random random(seed);
  for (const std::string& backend : cuda_backends(cpu)) {
    Call cuda(spec);
    const Placement placement = random.pick({Placement::kAligned, Placement::kAligned, Placement::kElementAligned});
    ASSERT_TRUE(judge_on_cuda(cuda, backend, placement));
    EXPECT_EQ(first_disagreement(cpu, cuda), "") << backend << ": " << to_string(spec);
    if (!stores_exactly(spec)) continue;
    for (const char* cache : {"key_cache", "value_cache"}) {
      if (!cpu.has_buffer(cache)) continue;
      EXPECT_EQ(cpu.buffer(cache).copy(), cuda.buffer(cache).copy())
          << cache << " of " << backend << ": " << to_string(spec);
    }
  }
}

TEST(CudaFuzz, AgreesWithTheCpu) {
  const FuzzFlags& flags = fuzz_flags();
  std::printf("seeds %llu to %llu\n", static_cast<unsigned long long>(flags.seed),
              static_cast<unsigned long long>(flags.seed + flags.cases - 1));
  for (std::uint64_t seed = flags.seed; seed < flags.seed + flags.cases; ++seed) {
    run_case(seed);
    if (HasFailure()) {
      FAIL() << "again: octavo_cuda_test --gtest_filter=CudaFuzz.* --fuzz_cases=1 --fuzz_seed=" << seed;
    }
  }
}

}  // namespace
}  // namespace octavo::testing
