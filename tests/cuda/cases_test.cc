// Every CUDA backend runs every Case of the CPU suite, against the same oracle, in hostile memory.
#include <gtest/gtest.h>

#include <cctype>
#include <string>

#include "cuda/device_call.h"
#include "support/case_list.h"

namespace octavo::testing {
namespace {

void expect_oracle(const Case& spec) {
  Call call(spec);
  const Call::Snapshot start = call.snapshot();
  for (const std::string& backend : cuda_backends(call)) {
    EXPECT_TRUE(judge_on_cuda(call, backend, Placement::kAligned));
    // Memory that is aligned to its elements only is as good, to the bit.
    const Call::Snapshot aligned = call.snapshot();
    call.restore(start);
    const Status status = DeviceCall(call, Placement::kElementAligned).run(backend);
    EXPECT_TRUE(status.ok()) << status.message() << "\n" << to_string(spec);
    EXPECT_EQ(call.changes_since(aligned), "") << "bits depend on alignment: " << to_string(spec);
    call.restore(start);
  }
}

class EveryCudaBackend : public ::testing::TestWithParam<Case> {};

TEST_P(EveryCudaBackend, AgreesWithTheOracle) {
  expect_oracle(GetParam());
}

std::string test_name(const ::testing::TestParamInfo<Case>& info) {
  std::string name = info.param.name;
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}

INSTANTIATE_TEST_SUITE_P(Feature, EveryCudaBackend, ::testing::ValuesIn(single_feature_cases()), test_name);
INSTANTIATE_TEST_SUITE_P(Pair, EveryCudaBackend, ::testing::ValuesIn(feature_pair_cases()), test_name);
INSTANTIATE_TEST_SUITE_P(Type, EveryCudaBackend, ::testing::ValuesIn(type_cases()), test_name);
INSTANTIATE_TEST_SUITE_P(Size, EveryCudaBackend, ::testing::ValuesIn(size_cases()), test_name);
INSTANTIATE_TEST_SUITE_P(Length, EveryCudaBackend, ::testing::ValuesIn(length_cases()), test_name);

// The features again in the 16-bit types, whose kernels are others.
Case as_type(Case c, ElementType type) {
  c.type = type;
  return c;
}

TEST(EveryCudaBackend, AgreesOnFeaturesIn16BitTypes) {
  for (const ElementType type : {ElementType::kFloat16, ElementType::kBFloat16}) {
    for (const Case& c : single_feature_cases()) expect_oracle(as_type(c, type));
    for (const Case& c : length_cases()) expect_oracle(as_type(c, type));
  }
}

TEST(EveryCudaBackend, AgreesOnRandomCases) {
  for (std::uint64_t seed = 1; seed <= 600; ++seed) {
    expect_oracle(random_case(seed));
    if (HasFailure()) FAIL() << "seed " << seed;
  }
}

}  // namespace
}  // namespace octavo::testing
