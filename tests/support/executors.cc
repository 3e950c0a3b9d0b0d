#include "support/executors.h"

#include <atomic>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "support/random.h"

namespace octavo::testing {

void ReverseExecutor::parallel_for(std::int64_t count, Task task, void* context) noexcept {
  for (std::int64_t i = count - 1; i >= 0; --i) task(context, i);
}

void ShufflingExecutor::parallel_for(std::int64_t count, Task task, void* context) noexcept {
  std::vector<std::int64_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  Random random(seed_++);
  for (std::size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)))]);
  }
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < order.size(); i = next++) task(context, order[i]);
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < concurrency_; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace octavo::testing
