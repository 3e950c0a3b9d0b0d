// Runs the GPU tests, or says why it cannot: exit code 77 tells ctest that they were skipped.
//   --separate_allocations   an allocation a tensor, for compute-sanitizer
#include <gtest/gtest.h>

#include <cstdio>
#include <string_view>

#include "cuda/device_call.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]) == "--separate_allocations") {
      octavo::testing::DeviceCall::default_placement() = octavo::testing::Placement::kSeparate;
    }
  }
  if (const std::string reason = octavo::testing::missing_cuda(); !reason.empty()) {
    std::printf("skipped: %s\n", reason.c_str());
    return 77;
  }
  return RUN_ALL_TESTS();
}
