// Runs the GPU tests, or says why it cannot: exit code 77 tells ctest that they were skipped.
//   --separate_allocations         an allocation a tensor, for compute-sanitizer
//   --fuzz_seed=S --fuzz_cases=N   of the differential fuzzing
#include <gtest/gtest.h>

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <string_view>

#include "cuda/device_call.h"
#include "cuda/fuzz_flags.h"

namespace {

// Whether `argument` is "NAME=NUMBER"; the number then.
bool read_number(std::string_view argument, std::string_view name, std::uint64_t& number) {
  if (argument.substr(0, name.size()) != name) return false;
  const char* end = argument.data() + argument.size();
  const auto [stop, error] = std::from_chars(argument.data() + name.size(), end, number);
  return error == std::errc() && stop == end;
}

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  octavo::testing::FuzzFlags& fuzz = octavo::testing::fuzz_flags();
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument(argv[i]);
    if (argument == "--separate_allocations") {
      octavo::testing::DeviceCall::default_placement() = octavo::testing::Placement::kSeparate;
    } else if (!read_number(argument, "--fuzz_seed=", fuzz.seed) &&
               !read_number(argument, "--fuzz_cases=", fuzz.cases)) {
      std::printf("unknown argument %s\n", argv[i]);
      return 2;
    }
  }
  if (const std::string reason = octavo::testing::missing_cuda(); !reason.empty()) {
    std::printf("skipped: %s\n", reason.c_str());
    return 77;
  }
  return RUN_ALL_TESTS();
}
