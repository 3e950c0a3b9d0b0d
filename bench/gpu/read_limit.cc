#include "read_limit.h"

#include <algorithm>

#include "kernels.h"

namespace octavo::bench {

std::vector<ReadTime> measure_reads(const Stream& stream) {
  constexpr std::int64_t kPool = std::int64_t{2} << 30;
  const Buffer pool(kPool), sink(16);
  check(launch_fill(pool.data(), pool.bytes(), CacheType::kInt4, 1, stream), "fill");
  std::vector<ReadTime> result;
  for (std::int64_t bytes = std::int64_t{8} << 20; bytes <= std::int64_t{1} << 30; bytes *= 2) {
    const auto buffers = std::clamp<std::int64_t>((std::int64_t{512} << 20) / bytes, 2, 64);
    const auto calls = std::max<std::int64_t>(buffers, 8);
    ReadTime best{bytes, 0.0, {}};
    for (const bool streaming : {false, true}) {
      for (const int threads : {128, 256, 512}) {
        for (const int loads : {2, 4, 8, 16}) {
          const ReadShape shape{threads, loads, streaming};
          const Graph graph = Graph::capture(stream, [&] {
            for (std::int64_t i = 0; i < calls; ++i) {
              const auto* data = static_cast<const std::byte*>(pool.data()) + i % buffers * bytes;
              check(launch_read(data, static_cast<std::size_t>(bytes), shape, sink.data(), stream), "read");
            }
          });
          const double us = time_replays(stream, {&graph}, 25e3)[0].median / static_cast<double>(calls);
          if (best.microseconds > 0.0 && us >= best.microseconds) continue;
          best.microseconds = us;
          best.shape = std::to_string(threads) + " threads, " + std::to_string(loads) + " loads of 16 bytes" +
                       (streaming ? ", streaming" : "");
        }
      }
    }
    result.push_back(best);
  }
  return result;
}

}  // namespace octavo::bench
