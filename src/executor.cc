#include "octavo/executor.h"

#include <algorithm>
#include <new>

#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace octavo {
namespace {

class SerialExecutor final : public Executor {
 public:
  void parallel_for(std::int64_t count, Task task, void* context) noexcept override {
    for (std::int64_t index = 0; index < count; ++index) task(context, index);
  }
  int concurrency() const noexcept override { return 1; }
};

#ifdef _OPENMP

#if defined(__unix__) || defined(__APPLE__)
// A forked child inherits libgomp's idea of a pool, but not its threads: a parallel region would wait for them for
// ever.
bool in_forked_child = false;

void watch_forks() noexcept {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { in_forked_child = true; });
  static_cast<void>(registered);
}
#else
constexpr bool in_forked_child = false;
void watch_forks() noexcept {}
#endif

constexpr int kMaxThreads = 4096;

class OpenMpExecutor final : public Executor {
 public:
  explicit OpenMpExecutor(int threads) noexcept : threads_(std::clamp(threads, 1, kMaxThreads)) { watch_forks(); }

  void parallel_for(std::int64_t count, Task task, void* context) noexcept override {
    const int team = static_cast<int>(std::min<std::int64_t>(threads_, count));
    // Dynamic: sequences differ in length, so tasks differ in cost. One task needs no team of threads.
#pragma omp parallel for schedule(dynamic) num_threads(team) if (team > 1 && !in_forked_child)
    for (std::int64_t index = 0; index < count; ++index) task(context, index);
  }
  int concurrency() const noexcept override {
    return threads_;
  }

 private:
  const int threads_;
};
#endif

}  // namespace

Executor& serial_executor() noexcept {
  static SerialExecutor executor;
  return executor;
}

#ifdef _OPENMP
Executor& default_executor() noexcept {
  static OpenMpExecutor executor(omp_get_max_threads());
  return executor;
}

std::unique_ptr<Executor> make_executor(int threads) noexcept {
  return std::unique_ptr<Executor>(new (std::nothrow) OpenMpExecutor(threads));
}
#else
Executor& default_executor() noexcept {
  return serial_executor();
}

std::unique_ptr<Executor> make_executor(int) noexcept {
  return std::unique_ptr<Executor>(new (std::nothrow) SerialExecutor());
}
#endif

}  // namespace octavo
