#include "ort/cuda_workspace.h"

#include <map>

namespace octavo::ort {
namespace {

// Lets this thread ask about events while another one captures a graph, which would else break the capture.
class RelaxedCapture {
 public:
  RelaxedCapture() noexcept { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // the thread's own, once exchanged
};

}  // namespace

Status to_status(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return {};
  static_cast<void>(cudaGetLastError());
  return {StatusCode::kInternal, std::string("CUDA: ") + doing + " failed: " + cudaGetErrorString(error)};
}

std::shared_ptr<CudaWorkspaces> CudaWorkspaces::of(const std::shared_ptr<const Arena>& arena) {
  static std::mutex mutex;
  // Never freed: sessions may end after this library's static objects.
  static auto& known = *new std::map<const OrtMemoryInfo*, std::weak_ptr<CudaWorkspaces>>();
  const std::lock_guard guard(mutex);
  std::weak_ptr<CudaWorkspaces>& slot = known[arena->memory_info()];
  std::shared_ptr<CudaWorkspaces> workspaces = slot.lock();
  if (workspaces == nullptr) {
    workspaces = std::make_shared<CudaWorkspaces>(arena);
    slot = workspaces;
    std::erase_if(known, [](const auto& entry) { return entry.second.expired(); });
  }
  return workspaces;
}

CudaWorkspaces::~CudaWorkspaces() {
  for (const Piece& piece : pieces_) free_piece(piece);
}

Status CudaWorkspaces::take(cudaStream_t stream, std::size_t bytes, Piece*& piece) {
  const std::lock_guard guard(mutex_);
  for (Piece& candidate : pieces_) {
    if (candidate.in_call || candidate.stream != stream || candidate.bytes < bytes) continue;
    candidate.in_call = true;
    piece = &candidate;
    return {};
  }
  free_finished();
  Piece made;
  made.bytes = bytes;
  made.stream = stream;
  if (Status status = arena_->allocate(bytes, made.data); !status.ok()) return status;
  Status status = to_status(cudaEventCreateWithFlags(&made.done, cudaEventDisableTiming), "making an event");
  if (!status.ok()) {
    arena_->free(made.data);
    return status;
  }
  piece = &pieces_.emplace_back(made);
  return {};
}

Status CudaWorkspaces::give_back(Piece& piece) {
  const std::lock_guard guard(mutex_);
  piece.in_call = false;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  Status status = to_status(cudaStreamIsCapturing(piece.stream, &capture), "asking whether a stream is captured");
  if (capture != cudaStreamCaptureStatusNone) piece.captured = true;
  if (!status.ok() || piece.captured) return status;
  status = to_status(cudaEventRecord(piece.done, piece.stream), "recording an event");
  if (!status.ok()) piece.captured = true;  // nothing will say when its work is done
  return status;
}

// Gives back what no work uses any more.
void CudaWorkspaces::free_finished() {
  const RelaxedCapture relaxed;
  for (auto piece = pieces_.begin(); piece != pieces_.end();) {
    const bool finished = !piece->in_call && !piece->captured && cudaEventQuery(piece->done) == cudaSuccess;
    if (finished) free_piece(*piece);
    piece = finished ? pieces_.erase(piece) : std::next(piece);
  }
  static_cast<void>(cudaGetLastError());  // "not ready" is no error
}

void CudaWorkspaces::free_piece(const Piece& piece) noexcept {
  if (!piece.captured) static_cast<void>(cudaEventSynchronize(piece.done));  // passed, but at the end of a session
  static_cast<void>(cudaEventDestroy(piece.done));
  arena_->free(piece.data);
}

}  // namespace octavo::ort
