#include "cuda/runtime.h"

#include <exception>
#include <map>
#include <mutex>

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
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&facts.shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal);
  }
  facts.compute_capability = 10 * major + minor;
  return error;
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
