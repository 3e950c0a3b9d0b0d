// CUDAExecutionProvider: device memory and the session's stream. This file and cuda_workspace.cc alone call the CUDA
// runtime, and are built only with OCTAVO_CUDA. That runtime is linked statically into this library; it shares the
// device's primary context, and so streams and memory, with the one that ONNX Runtime has loaded.
#include <cuda_runtime_api.h>

#include <utility>

#include "ort/arena.h"
#include "ort/cuda_workspace.h"
#include "ort/device.h"

namespace octavo::ort {
namespace {

// Makes a device the thread's current one for as long as it lives, as octavo::run() wants it. ONNX Runtime does the
// same before it runs a session, so that nothing has to change as a rule.
class CurrentDevice {
 public:
  CurrentDevice() noexcept = default;
  ~CurrentDevice() {
    if (previous_ >= 0) static_cast<void>(cudaSetDevice(previous_));
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  Status set(int ordinal) {
    int current = 0;
    Status status = to_status(cudaGetDevice(&current), "reading the current device");
    if (!status.ok() || current == ordinal) return status;
    status = to_status(cudaSetDevice(ordinal), "changing the current device");
    if (status.ok()) previous_ = current;
    return status;
  }

 private:
  int previous_ = -1;  // to go back to
};

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(const OrtApi& api) : api_(api) {}

  Status open(const OrtKernelInfo* info) {
    auto arena = std::make_shared<Arena>(api_);
    Status status = arena->open(info);
    if (!status.ok()) return status;
    workspaces_ = CudaWorkspaces::of(arena);
    return from_ort_status(api_, api_.MemoryInfoGetId(arena->memory_info(), &ordinal_), "reading the device's number");
  }

  void place(PlanOptions& options) const noexcept override {
    options.device = DeviceKind::kCuda;
    options.device_ordinal = ordinal_;
  }

  // Everything goes onto the session's stream, in order; nothing waits, so that a session can capture it in a graph.
  Status run(OrtKernelContext* context, const Plan& plan, const Arguments& arguments,
             std::span<const CacheCopy> copies) const override {
    RunContext run_context;
    Status status = from_ort_status(api_, api_.KernelContext_GetGPUComputeStream(context, &run_context.stream),
                                    "getting the compute stream");
    if (!status.ok()) return status;
    CurrentDevice current;
    status = current.set(ordinal_);
    if (!status.ok()) return status;
    if (plan.workspace_bytes() == 0) return enqueue(plan, arguments, copies, {}, run_context);

    CudaWorkspaces::Piece* piece = nullptr;
    status = workspaces_->take(static_cast<cudaStream_t>(run_context.stream),
                               plan.workspace_bytes() + kWorkspaceAlignment, piece);
    if (!status.ok()) return status;
    status = enqueue(plan, arguments, copies, aligned_workspace(piece->data, piece->bytes), run_context);
    Status given_back = workspaces_->give_back(*piece);
    return status.ok() ? given_back : status;
  }

 private:
  static Status enqueue(const Plan& plan, const Arguments& arguments, std::span<const CacheCopy> copies,
                        Workspace workspace, const RunContext& run_context) {
    const auto stream = static_cast<cudaStream_t>(run_context.stream);
    for (const CacheCopy& copy : copies) {
      Status status = to_status(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDeviceToDevice, stream),
                                "the copy of a cache");
      if (!status.ok()) return status;
    }
    return octavo::run(plan, arguments, workspace, run_context);
  }

  const OrtApi& api_;
  std::shared_ptr<CudaWorkspaces> workspaces_;
  int ordinal_ = 0;
};

}  // namespace

Status make_cuda_device(const OrtApi& api, const OrtKernelInfo* info, std::unique_ptr<Device>& device) {
  auto made = std::make_unique<CudaDevice>(api);
  Status status = made->open(info);
  if (status.ok()) device = std::move(made);
  return status;
}

}  // namespace octavo::ort
