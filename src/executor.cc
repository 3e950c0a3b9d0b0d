#include "octavo/executor.h"

#include <algorithm>

#ifdef _OPENMP
#include <omp.h>
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
class OpenMpExecutor final : public Executor {
 public:
  void parallel_for(std::int64_t count, Task task, void* context) noexcept override {
    // Dynamic: sequences differ in length, so tasks differ in cost. One task needs no team of threads.
#pragma omp parallel for schedule(dynamic) if (count > 1)
    for (std::int64_t index = 0; index < count; ++index) task(context, index);
  }
  int concurrency() const noexcept override {
    return std::max(omp_get_max_threads(), 1);
  }
};
#endif

}  // namespace

Executor& serial_executor() noexcept {
  static SerialExecutor executor;
  return executor;
}

Executor& default_executor() noexcept {
#ifdef _OPENMP
  static OpenMpExecutor executor;
  return executor;
#else
  return serial_executor();
#endif
}

}  // namespace octavo
