// One test a backend of this build: agrees on a plain Case, or is skipped with what the processor lacks, so that a
// report shows which backends the other tests have not touched.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "backends/harness.h"

namespace octavo::testing {
namespace {

std::vector<Verdict> verdicts() {
  const Call call{Case{}};
  Problem problem;
  EXPECT_TRUE(validate(call.arguments, call.attributes, problem).ok());
  return explain(problem);
}

std::vector<std::string> backends_of_this_build() {
  std::vector<std::string> names;
  for (const Verdict& verdict : verdicts()) names.push_back(verdict.backend);
  return names;
}

class Backend : public ::testing::TestWithParam<std::string> {};

TEST_P(Backend, RunsOnThisProcessor) {
  const std::vector<Verdict> all = verdicts();
  const auto verdict = std::find_if(all.begin(), all.end(), [](const Verdict& v) { return v.backend == GetParam(); });
  ASSERT_NE(verdict, all.end());
  if (!verdict->refusal.empty()) GTEST_SKIP() << GetParam() << ": " << verdict->refusal;
  Call call{Case{}};
  EXPECT_TRUE(judge(call, {.backend = GetParam()}));
}

INSTANTIATE_TEST_SUITE_P(OfThisBuild, Backend, ::testing::ValuesIn(backends_of_this_build()),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace octavo::testing
