// Executor: how the CPU backends run work in parallel. ONNX Runtime passes its own pool, others take the default.
#pragma once

#include <cstdint>
#include <memory>

namespace octavo {

class Executor {
 public:
  using Task = void (*)(void* context, std::int64_t index);

  virtual ~Executor() = default;

  // Runs task(context, i) once for every i in [0, count), in any order and on any thread, and returns when all are
  // done. Tasks neither throw nor call the executor again.
  virtual void parallel_for(std::int64_t count, Task task, void* context) noexcept = 0;

  // How many tasks can run at once, at least 1. Results never depend on it, only speed and workspace size do.
  virtual int concurrency() const noexcept = 0;
};

// Runs everything on the calling thread.
Executor& serial_executor() noexcept;

// OpenMP's pool where the library was built with OpenMP, else serial_executor(). Serial in a forked child, where
// OpenMP's threads do not exist.
Executor& default_executor() noexcept;

// As default_executor(), with teams of at most `threads` (1 to 4096; others are clamped). nullptr when out of memory.
std::unique_ptr<Executor> make_executor(int threads) noexcept;

}  // namespace octavo
