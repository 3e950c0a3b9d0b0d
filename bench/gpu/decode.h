// One decode row: made, checked against attention in float64, timed.
#pragma once

#include <cstdint>
#include <string>

#include "graph.h"
#include "work.h"

namespace octavo::bench {

struct Result {
  std::string backend;
  Times attention, call;  // us of one call: attention with its merge; the whole operator, append included
  std::size_t attention_kernels = 0, call_kernels = 0;  // of one call
  std::int64_t bytes = 0;                               // Work::bytes()
  double error = 0.0;                                   // relative error of the output: |out - reference| / |reference|
  double worst_error = 0.0;                             // of the worst row (query token and head)
  std::size_t caches = 0, calls = 0;                    // distinct caches, and calls of a graph
};

// Throws std::runtime_error: no backend takes it, an output is wrong, CUDA failed.
Result measure(const Work& work, const std::string& backend, const Stream& stream);

}  // namespace octavo::bench
