// CPUExecutionProvider: host memory, and the session's own thread pool.
#include <cstring>

#include "ort/arena.h"
#include "ort/device.h"
#include "ort/thread_pool.h"

namespace octavo::ort {
namespace {

// Given back when the call returns, which on a CPU is when its work is done.
class CallWorkspace {
 public:
  explicit CallWorkspace(const Arena& arena) noexcept : arena_(arena) {}
  ~CallWorkspace() { arena_.free(data_); }
  CallWorkspace(const CallWorkspace&) = delete;
  CallWorkspace& operator=(const CallWorkspace&) = delete;

  Status allocate(std::size_t bytes, Workspace& workspace) {
    if (bytes == 0) return {};
    const std::size_t padded = bytes + kWorkspaceAlignment;
    Status status = arena_.allocate(padded, data_);
    if (status.ok()) workspace = aligned_workspace(data_, padded);
    return status;
  }

 private:
  const Arena& arena_;
  void* data_ = nullptr;
};

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(const OrtApi& api) noexcept : api_(api), arena_(api) {}

  Status open(const OrtKernelInfo* info) { return arena_.open(info); }

  void place(PlanOptions& options) const noexcept override { options.device = DeviceKind::kCpu; }

  Status run(OrtKernelContext* context, const Plan& plan, const Arguments& arguments,
             std::span<const CacheCopy> copies) const override {
    CallWorkspace memory(arena_);
    Workspace workspace;
    Status status = memory.allocate(plan.workspace_bytes(), workspace);
    if (!status.ok()) return status;
    for (const CacheCopy& copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
    ContextExecutor executor(api_, context, plan.concurrency());
    RunContext run_context;
    run_context.executor = &executor;
    return octavo::run(plan, arguments, workspace, run_context);
  }

 private:
  const OrtApi& api_;
  Arena arena_;
};

}  // namespace

Status make_cpu_device(const OrtApi& api, const OrtKernelInfo* info, std::unique_ptr<Device>& device) {
  auto made = std::make_unique<CpuDevice>(api);
  Status status = made->open(info);
  if (status.ok()) device = std::move(made);
  return status;
}

}  // namespace octavo::ort
