// Every backend that accepts runs every Case of the lists, against the oracle, in hostile memory.
#include <gtest/gtest.h>

#include <cctype>
#include <string>

#include "backends/harness.h"
#include "support/case_list.h"
#include "support/random.h"

namespace octavo::testing {
namespace {

class EveryBackend : public ::testing::TestWithParam<Case> {};

TEST_P(EveryBackend, AgreesWithTheOracle) {
  expect_oracle(GetParam());
}

std::string test_name(const ::testing::TestParamInfo<Case>& info) {
  std::string name = info.param.name;
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}

INSTANTIATE_TEST_SUITE_P(Feature, EveryBackend, ::testing::ValuesIn(single_feature_cases()), test_name);
INSTANTIATE_TEST_SUITE_P(Pair, EveryBackend, ::testing::ValuesIn(feature_pair_cases()), test_name);
INSTANTIATE_TEST_SUITE_P(Type, EveryBackend, ::testing::ValuesIn(type_cases()), test_name);
INSTANTIATE_TEST_SUITE_P(Size, EveryBackend, ::testing::ValuesIn(size_cases()), test_name);
INSTANTIATE_TEST_SUITE_P(Length, EveryBackend, ::testing::ValuesIn(length_cases()), test_name);

// A fixed sample of what the fuzzer draws, so that a plain test run has met every field of Case.
TEST(EveryBackend, AgreesOnRandomCases) {
  for (std::uint64_t seed = 1; seed <= 150; ++seed) {
    expect_oracle(random_case(seed));
    if (HasFailure()) FAIL() << "seed " << seed;
  }
}

}  // namespace
}  // namespace octavo::testing
