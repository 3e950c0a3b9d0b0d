// The workspaces of the calls that are on their way on a GPU.
//
// A call returns before its work is done. Its workspace cannot go back to the arena then: ONNX Runtime could give it to
// another stream at once. (Runs in different threads have different streams, which end with their threads.) So it stays
// here until the GPU has passed an event behind the work; the next call on the same stream may have it before that.
#pragma once

#include <cuda_runtime_api.h>

#include <list>
#include <memory>
#include <mutex>

#include "ort/arena.h"

namespace octavo::ort {

// kInternal, with the runtime's words. The error is taken off the thread, so that no later check finds it again.
Status to_status(cudaError_t error, const char* doing);

class CudaWorkspaces {
 public:
  // One call's memory.
  struct Piece {
    void* data = nullptr;
    std::size_t bytes = 0;
    cudaStream_t stream = nullptr;
    cudaEvent_t done = nullptr;  // recorded behind the work, unless it was captured
    bool in_call = true;         // its call has not returned yet
    bool captured = false;       // graphs use it for ever
  };

  // All kernels of a session share one. Thread-safe, as are the next two.
  static std::shared_ptr<CudaWorkspaces> of(const std::shared_ptr<const Arena>& arena);

  explicit CudaWorkspaces(std::shared_ptr<const Arena> arena) noexcept : arena_(std::move(arena)) {}
  ~CudaWorkspaces();
  CudaWorkspaces(const CudaWorkspaces&) = delete;
  CudaWorkspaces& operator=(const CudaWorkspaces&) = delete;

  // At least `bytes` for a call that works on `stream`. Errors: the arena is full.
  Status take(cudaStream_t stream, std::size_t bytes, Piece*& piece);

  // All of the call's work is on the stream.
  Status give_back(Piece& piece);

 private:
  void free_finished();
  void free_piece(const Piece& piece) noexcept;

  std::shared_ptr<const Arena> arena_;
  std::mutex mutex_;
  std::list<Piece> pieces_;
};

}  // namespace octavo::ort
