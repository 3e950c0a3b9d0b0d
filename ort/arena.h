// ONNX Runtime's memory: the arena on the device of a kernel's execution provider.
#pragma once

#include "octavo/paged_attention.h"
#include "ort/api.h"

namespace octavo::ort {

class Arena {
 public:
  explicit Arena(const OrtApi& api) noexcept : api_(api) {}
  ~Arena() {
    if (allocator_ != nullptr) api_.ReleaseAllocator(allocator_);
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  Status open(const OrtKernelInfo* info) {
    Status status = from_ort_status(api_, api_.KernelInfoGetAllocator(info, OrtMemTypeDefault, &allocator_),
                                    "getting the allocator");
    if (!status.ok()) return status;
    return from_ort_status(api_, api_.AllocatorGetInfo(allocator_, &memory_info_), "reading the allocator's device");
  }

  // Errors: the runtime's words. (KernelContext_GetScratchBuffer, which looks made for this, ends the process when the
  // arena is full: it throws out of a function that must not.)
  Status allocate(std::size_t bytes, void*& data) const {
    return from_ort_status(api_, api_.AllocatorAlloc(allocator_, bytes, &data), "allocating the workspace");
  }

  // Whoever allocates next may have it at once: work that is still to be done must not use it.
  void free(void* data) const noexcept {
    if (data != nullptr) static_cast<void>(succeeded(api_, api_.AllocatorFree(allocator_, data)));
  }

  const OrtMemoryInfo* memory_info() const noexcept { return memory_info_; }  // the same for all kernels of a session

 private:
  const OrtApi& api_;
  OrtAllocator* allocator_ = nullptr;
  const OrtMemoryInfo* memory_info_ = nullptr;
};

}  // namespace octavo::ort
