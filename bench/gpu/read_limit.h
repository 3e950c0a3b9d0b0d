// The fastest way found to read memory once: what every floor of the table is made of.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "graph.h"

namespace octavo::bench {

struct ReadTime {
  std::int64_t bytes = 0;
  double microseconds = 0.0;
  std::string shape;  // of the kernel that was fastest
};

// Best time for 8, 16, ..., 1024 MiB, cold: graphs of reads that go round distinct buffers.
std::vector<ReadTime> measure_reads(const Stream& stream);

}  // namespace octavo::bench
