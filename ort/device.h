// What a kernel asks of the device that its execution provider stands for. Each device is a file; registration.cc lists
// them.
#pragma once

#include <memory>
#include <span>

#include "octavo/paged_attention.h"
#include "ort/api.h"

namespace octavo::ort {

// The old contents of a cache, wanted in another buffer before the call updates it there.
struct CacheCopy {
  void* to;
  const void* from;
  std::size_t bytes;
};

class Device {
 public:
  virtual ~Device() = default;

  // Says where plans are to run.
  virtual void place(PlanOptions& options) const noexcept = 0;

  // Takes a workspace from ONNX Runtime, makes the copies, runs the plan. Thread-safe.
  virtual Status run(OrtKernelContext* context, const Plan& plan, const Arguments& arguments,
                     std::span<const CacheCopy> copies) const = 0;
};

// Makes the device of the execution provider that the node of `info` was given to. `api` outlives it.
using MakeDevice = Status (*)(const OrtApi& api, const OrtKernelInfo* info, std::unique_ptr<Device>& device);

Status make_cpu_device(const OrtApi& api, const OrtKernelInfo* info, std::unique_ptr<Device>& device);
Status make_cuda_device(const OrtApi& api, const OrtKernelInfo* info, std::unique_ptr<Device>& device);  // OCTAVO_CUDA

}  // namespace octavo::ort
