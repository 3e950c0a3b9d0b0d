// The random streams of a Call's tensors (internal to call.cc and call_storage.cc).
#pragma once

#include <cstdint>

namespace octavo::testing {

// Streams of random numbers, one per tensor.
enum Stream : std::int64_t {
  kQuery,
  kKey,
  kValue,
  kPastKey,
  kPastValue,
  kSink,
  kQNorm,
  kKNorm,
  kKScale,
  kVScale,
  kBias
};

}  // namespace octavo::testing
