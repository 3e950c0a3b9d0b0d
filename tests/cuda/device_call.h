// DeviceCall: the tensors of a Call mirrored in device memory, between guard zones, and runs on them.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "octavo/paged_attention.h"
#include "reference/compare.h"
#include "support/call.h"

namespace octavo::testing {

// Device memory that is freed with the object.
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  std::byte* data() const { return data_; }
  std::size_t size() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

enum class Placement {
  kAligned,         // at 256-byte boundaries
  kElementAligned,  // one element past them: no vector access may assume more
  kSeparate,  // an allocation each, without guards or poison: compute-sanitizer sees every end and every unset byte
};

class DeviceCall {
 public:
  // `call` stays the host's side and must outlive this.
  explicit DeviceCall(Call& call, Placement placement = default_placement());

  // kAligned, or what the flag --separate_allocations sets.
  static Placement& default_placement();

  // validate, plan, upload, launch on a stream of the tests' own, wait, download.
  Status run(const std::string& backend);

  // The steps of run(), for tests that capture.
  Status prepare(const std::string& backend);  // plans and places; device pointers stay the same from here on
  void upload();                               // Call's tensors to the device; workspace and guards are poisoned anew
  void upload(const std::vector<std::string>& names,
              const Call& from);  // some of them, out of another Call of equal shapes
  Status launch(cudaStream_t stream) const;
  void download();  // the device's tensors to Call

  // Tensors whose guard zones were written, found by download(); the workspace counts.
  const std::string& broken_guards() const { return broken_; }
  const Plan& plan() const { return plan_; }
  Arguments& arguments() { return arguments_; }  // what launch() passes; made by prepare()

 private:
  struct Mirror {
    std::byte* host = nullptr;  // nullptr: the workspace
    std::size_t bytes = 0;
    std::size_t at = 0;  // in the image
    std::byte* device = nullptr;
  };

  void place();

  Call& call_;
  Placement placement_;
  Plan plan_;
  Arguments arguments_;  // with device pointers; attention_metadata stays in host memory
  std::map<std::string, Mirror> mirrors_;
  std::vector<std::byte> image_;  // what the one allocation holds
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
  std::string broken_;
};

// Not the default stream, which would hide a launch on the wrong one.
cudaStream_t test_stream();

// Fails the test, with the runtime's words, unless `error` is success.
void expect_success(cudaError_t error, const char* what);

// Why there is no CUDA here; empty if there is.
std::string missing_cuda();

// The CUDA backends that accept `call`.
std::vector<std::string> cuda_backends(const Call& call);

// What the CUDA backends round besides float32 arithmetic, in a call like this.
Arithmetic cuda_arithmetic(const Case& spec);

// Runs `call` on a backend and compares with the oracle.
::testing::AssertionResult judge_on_cuda(Call& call, const std::string& backend, Placement placement);

// Runs `call`; a status other than ok, or a broken guard, is a test failure.
void run_on_cuda(Call& call, const std::string& backend);

}  // namespace octavo::testing
