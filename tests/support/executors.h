// Executors that try to provoke a dependence on order or on the number of threads.
#pragma once

#include <cstdint>

#include "octavo/executor.h"

namespace octavo::testing {

// Runs the tasks on the calling thread from the last to the first, and claims a concurrency.
class ReverseExecutor final : public Executor {
 public:
  explicit ReverseExecutor(int concurrency) : concurrency_(concurrency) {}
  void parallel_for(std::int64_t count, Task task, void* context) noexcept override;
  int concurrency() const noexcept override { return concurrency_; }

 private:
  int concurrency_;
};

// Runs the tasks in a shuffled order on `concurrency` threads of its own; every call shuffles differently.
class ShufflingExecutor final : public Executor {
 public:
  ShufflingExecutor(int concurrency, std::uint64_t seed) : concurrency_(concurrency), seed_(seed) {}
  void parallel_for(std::int64_t count, Task task, void* context) noexcept override;
  int concurrency() const noexcept override { return concurrency_; }

 private:
  int concurrency_;
  std::uint64_t seed_;
};

}  // namespace octavo::testing
