// How long the fuzzing goes on, and from where; main.cc reads it from the command line.
#pragma once

#include <cstdint>

namespace octavo::testing {

struct FuzzFlags {
  std::uint64_t seed = 1000000;  // the other random tests start at 1
  std::uint64_t cases = 400;
};

inline FuzzFlags& fuzz_flags() {
  static FuzzFlags flags;
  return flags;
}

}  // namespace octavo::testing
