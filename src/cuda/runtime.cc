#include "cuda/runtime.h"

#include <exception>
#include <map>
#include <mutex>
#include <utility>

#include "contract/message.h"

namespace octavo::cuda {
namespace {

using contract::cat;

struct FactsByOrdinal {
  std::mutex mutex;
  std::map<int, DeviceFacts> known;
};

FactsByOrdinal& facts_by_ordinal() {
  static FactsByOrdinal facts;
  return facts;
}

cudaError_t ask(int ordinal, DeviceFacts& facts) {
  int major = 0;
  int minor = 0;
  const std::pair<cudaDeviceAttr, int*> questions[] = {
      {cudaDevAttrComputeCapabilityMajor, &major},
      {cudaDevAttrComputeCapabilityMinor, &minor},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, &facts.shared_memory},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, &facts.shared_memory_per_sm},
      {cudaDevAttrReservedSharedMemoryPerBlock, &facts.shared_memory_reserved},
      {cudaDevAttrMultiProcessorCount, &facts.multiprocessors}};
  for (const auto& [attribute, answer] : questions) {
    if (const cudaError_t error = cudaDeviceGetAttribute(answer, attribute, ordinal); error != cudaSuccess) {
      return error;
    }
  }
  facts.compute_capability = 10 * major + minor;
  return cudaSuccess;
}

}  // namespace

std::string read_device(int ordinal, DeviceFacts& facts) {
  FactsByOrdinal& cache = facts_by_ordinal();
  const std::lock_guard<std::mutex> lock(cache.mutex);
  if (const auto known = cache.known.find(ordinal); known != cache.known.end()) {
    facts = known->second;
    return {};
  }
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && (ordinal < 0 || ordinal >= count)) {
    return cat("device_ordinal must be below the ", count, " CUDA devices of this machine, got ", ordinal);
  }
  if (error == cudaSuccess) error = ask(ordinal, facts);
  if (error != cudaSuccess) {
    cudaGetLastError();  // the refusal is the report: a later check must not find it again
    return cat("no usable CUDA device ", ordinal, ": ", cudaGetErrorString(error));
  }
  cache.known.emplace(ordinal, facts);
  return {};
}

std::string read_usable_device(int ordinal, DeviceFacts& facts) {
  constexpr int kMinComputeCapability = 80;  // bfloat16 tensor cores and asynchronous copies
  if (std::string reason = read_device(ordinal, facts); !reason.empty()) return reason;
  if (facts.compute_capability >= kMinComputeCapability) return {};
  return cat("needs a device of compute capability 8.0, device ", ordinal, " has ", facts.compute_capability / 10, ".",
             facts.compute_capability % 10);
}

Status read_current_device(DeviceFacts& facts) {
  int ordinal = 0;
  if (const cudaError_t error = cudaGetDevice(&ordinal); error != cudaSuccess) return to_status(error, "cudaGetDevice");
  std::string refusal = read_device(ordinal, facts);
  if (refusal.empty()) return {};
  return {StatusCode::kInternal, std::move(refusal)};
}

Status to_status(cudaError_t error, const char* what) noexcept {
  if (error == cudaSuccess) return {};
  try {
    return {StatusCode::kInternal, cat("CUDA: ", what, " failed: ", cudaGetErrorString(error))};
  } catch (const std::exception&) {  // a message that could not be allocated
    return contract::out_of_memory();
  }
}

}  // namespace octavo::cuda
