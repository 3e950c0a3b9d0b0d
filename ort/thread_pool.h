// ONNX Runtime's own intra-op thread pool as octavo's Executor.
#pragma once

#include "octavo/executor.h"
#include "ort/api.h"

namespace octavo::ort {

// Lives for one call of the kernel.
class ContextExecutor final : public Executor {
 public:
  ContextExecutor(const OrtApi& api, const OrtKernelContext* context, int concurrency) noexcept
      : api_(api), context_(context), concurrency_(concurrency) {}

  void parallel_for(std::int64_t count, Task task, void* context) noexcept override {
    if (count <= 0) return;
    Call call{task, context};
    const auto run_one = [](void* opaque, std::size_t index) {
      const Call& target = *static_cast<const Call*>(opaque);
      target.task(target.context, static_cast<std::int64_t>(index));
    };
    // 0 batches: the pool hands out single indices, so that tasks of unequal length balance.
    OrtStatus* status = api_.KernelContext_ParallelFor(context_, run_one, static_cast<std::size_t>(count), 0, &call);
    if (!succeeded(api_, status)) {  // refused before it began (a runtime built without it): this thread does the work
      for (std::int64_t index = 0; index < count; ++index) task(context, index);
    }
  }

  int concurrency() const noexcept override { return concurrency_; }

 private:
  struct Call {
    Task task;
    void* context;
  };

  const OrtApi& api_;
  const OrtKernelContext* context_;
  int concurrency_;
};

}  // namespace octavo::ort
