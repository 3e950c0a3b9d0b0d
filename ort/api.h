// What every file here needs of ONNX Runtime's C API. Nothing of ONNX Runtime is linked: all calls go through the
// OrtApi that the host hands to RegisterCustomOps, so that several runtimes in one process do not meet.
#pragma once

#include <exception>
#include <memory>
#include <string>

#include "octavo/status.h"
#include "onnxruntime_c_api.h"

namespace octavo::ort {

// The API version that is asked for, whatever newer headers are installed: ONNX Runtime 1.23 must accept it. 21 is the
// oldest packaged header, and has all that is used here.
inline constexpr std::uint32_t kApiVersion = 21;
static_assert(ORT_API_VERSION >= kApiVersion, "the headers of ONNX Runtime are too old");

// The operator's fixed indices (docs/contract.md).
enum Input : std::size_t {
  kQuery,
  kKey,
  kValue,
  kKeyCache,
  kValueCache,
  kCumulativeSequenceLength,
  kPastSeqlens,
  kBlockTable,
  kCosCache,
  kSinCache,
  kSlotMapping,
  kHeadSink,
  kQNormWeight,
  kKNormWeight,
  kKScale,
  kVScale,
  kAttentionMetadata,
  kQueryPositions,
  kAttentionBias,
  kInputCount
};
enum Output : std::size_t { kOutput, kKeyCacheOut, kValueCacheOut, kOutputQk, kOutputCount };

// A rejection is ORT_INVALID_ARGUMENT whatever octavo calls it (a limit, a call that no backend takes): to the caller
// of a session, the model or its inputs have to change.
inline OrtStatus* to_ort_status(const OrtApi& api, const Status& status) noexcept {
  if (status.ok()) return nullptr;
  const OrtErrorCode code = status.code() == StatusCode::kInternal ? ORT_RUNTIME_EXCEPTION : ORT_INVALID_ARGUMENT;
  return api.CreateStatus(code, status.message().c_str());
}

// Takes the text out of a status of ONNX Runtime and frees it. `doing` says what failed.
inline Status from_ort_status(const OrtApi& api, OrtStatus* status, const char* doing) {
  if (status == nullptr) return {};
  std::string message = std::string(doing) + ": " + api.GetErrorMessage(status);
  api.ReleaseStatus(status);
  return {StatusCode::kInternal, std::move(message)};
}

// For calls whose failure means "absent": true on success.
inline bool succeeded(const OrtApi& api, OrtStatus* status) noexcept {
  if (status == nullptr) return true;
  api.ReleaseStatus(status);
  return false;
}

// Runs `body`, which returns a Status, and keeps exceptions (std::bad_alloc) from crossing into the host.
template <typename Body>
OrtStatus* guarded(const OrtApi& api, Body&& body) noexcept {
  try {
    return to_ort_status(api, body());
  } catch (const std::exception& error) {
    return api.CreateStatus(ORT_RUNTIME_EXCEPTION, error.what());
  }
}

struct TypeAndShapeDeleter {
  const OrtApi* api;
  void operator()(OrtTensorTypeAndShapeInfo* info) const noexcept { api->ReleaseTensorTypeAndShapeInfo(info); }
};
using TypeAndShape = std::unique_ptr<OrtTensorTypeAndShapeInfo, TypeAndShapeDeleter>;

}  // namespace octavo::ort
