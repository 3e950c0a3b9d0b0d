#include "cuda/device_call.h"

#include <algorithm>
#include <cstring>

#include "support/codecs.h"

namespace octavo::testing {
namespace {

constexpr std::size_t kBoundary = 256;
constexpr std::size_t kGuardBytes = 256;
constexpr std::byte kGuard{0xA5};
constexpr const char* kWorkspace = "workspace";

// On the tests' stream: a copy from pageable memory may still be under way when cudaMemcpy returns.
void copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  expect_success(cudaMemcpyAsync(to, from, bytes, kind, test_stream()), "cudaMemcpyAsync");
  if (kind == cudaMemcpyDeviceToHost) expect_success(cudaStreamSynchronize(test_stream()), "cudaStreamSynchronize");
}

}  // namespace

void expect_success(cudaError_t error, const char* what) {
  if (error != cudaSuccess) ADD_FAILURE() << what << ": " << cudaGetErrorString(error);
}

DeviceMemory::DeviceMemory(std::size_t bytes) : bytes_(bytes) {
  void* data = nullptr;
  expect_success(cudaMalloc(&data, std::max<std::size_t>(bytes, 1)), "cudaMalloc");
  data_ = static_cast<std::byte*>(data);
}
DeviceMemory::~DeviceMemory() {
  cudaFree(data_);
}

cudaStream_t test_stream() {
  static cudaStream_t stream = [] {
    cudaStream_t created = nullptr;
    expect_success(cudaStreamCreateWithFlags(&created, cudaStreamNonBlocking), "cudaStreamCreate");
    return created;
  }();
  return stream;
}

Placement& DeviceCall::default_placement() {
  static Placement placement = Placement::kAligned;
  return placement;
}

DeviceCall::DeviceCall(Call& call, Placement placement)
    : call_(call),
      placement_(default_placement() == Placement::kSeparate ? Placement::kSeparate : placement),
      arguments_(call.arguments) {
  for (const auto& [name, bytes] : call.snapshot()) {
    if (name != "attention_metadata") mirrors_[name] = {call.buffer(name).data(), bytes.size(), 0, nullptr};
  }
}

Status DeviceCall::prepare(const std::string& backend) {
  Problem problem;
  if (Status status = validate(call_.arguments, call_.attributes, problem); !status.ok()) return status;
  PlanOptions options;
  options.device = DeviceKind::kCuda;
  options.backend = backend;
  if (Status status = octavo::plan(problem, options, plan_); !status.ok()) return status;
  place();
  return {};
}

void DeviceCall::place() {
  mirrors_[kWorkspace] = {nullptr, plan_.workspace_bytes(), 0, nullptr};
  std::size_t used = 0;
  for (auto& [name, mirror] : mirrors_) {
    std::size_t shift = 0;
    if (placement_ == Placement::kElementAligned && mirror.host != nullptr) {
      for_each_device_tensor(call_.arguments, [&, &mirror = mirror](const auto& view) {
        if (view.data == mirror.host) shift = size_in_bytes(view.type);
      });
    }
    mirror.at = used + kGuardBytes + shift;
    used = (mirror.at + mirror.bytes + kGuardBytes + kBoundary - 1) / kBoundary * kBoundary;
  }
  memory_.clear();
  if (placement_ == Placement::kSeparate) {
    for (auto& [name, mirror] : mirrors_) {
      memory_.push_back(std::make_unique<DeviceMemory>(mirror.bytes));
      mirror.device = memory_.back()->data();
    }
  } else {
    image_.assign(used, kGuard);
    memory_.push_back(std::make_unique<DeviceMemory>(used));
    for (auto& [name, mirror] : mirrors_) mirror.device = memory_.back()->data() + mirror.at;
  }
  arguments_ = call_.arguments;
  for_each_device_tensor(arguments_, [&](auto& view) {
    // A view may start inside of a buffer: K and V interleaved in one tensor.
    const Call::Location location = call_.locate(view.data);
    ASSERT_NE(location.tensor, "") << "a tensor of the Call has no buffer";
    view.data = mirrors_.find(location.tensor)->second.device + location.offset;
  });
}

void DeviceCall::upload() {
  if (placement_ == Placement::kSeparate) {
    for (const auto& [name, mirror] : mirrors_) {
      if (mirror.host == nullptr) continue;
      copy(mirror.device, mirror.host, mirror.bytes, cudaMemcpyHostToDevice);
    }
    return;
  }
  std::fill(image_.begin(), image_.end(), kGuard);
  for (const auto& [name, mirror] : mirrors_) {
    if (mirror.bytes == 0) continue;
    if (mirror.host == nullptr) {
      std::memset(image_.data() + mirror.at, 0xFF, mirror.bytes);  // NaN, and lengths of -1
    } else {
      std::memcpy(image_.data() + mirror.at, mirror.host, mirror.bytes);
    }
  }
  copy(memory_[0]->data(), image_.data(), image_.size(), cudaMemcpyHostToDevice);
}

void DeviceCall::upload(const std::vector<std::string>& names, const Call& from) {
  const Call::Snapshot tensors = from.snapshot();
  for (const std::string& name : names) {
    const auto found = tensors.find(name);
    if (found == tensors.end()) continue;
    const Mirror& mirror = mirrors_.find(name)->second;
    ASSERT_EQ(found->second.size(), mirror.bytes) << name << " has another shape";
    copy(mirror.device, found->second.data(), mirror.bytes, cudaMemcpyHostToDevice);
  }
}

Status DeviceCall::launch(cudaStream_t stream) const {
  const Mirror& workspace = mirrors_.find(kWorkspace)->second;
  RunContext context;
  context.stream = stream;
  return octavo::run(plan_, arguments_, {workspace.device, workspace.bytes}, context);
}

void DeviceCall::download() {
  broken_.clear();
  if (placement_ == Placement::kSeparate) {
    for (const auto& [name, mirror] : mirrors_) {
      if (mirror.host == nullptr) continue;
      copy(mirror.host, mirror.device, mirror.bytes, cudaMemcpyDeviceToHost);
    }
    return;
  }
  copy(image_.data(), memory_[0]->data(), image_.size(), cudaMemcpyDeviceToHost);
  for (const auto& [name, mirror] : mirrors_) {
    if (mirror.host != nullptr && mirror.bytes > 0) std::memcpy(mirror.host, image_.data() + mirror.at, mirror.bytes);
    const auto is_guard = [](std::byte b) { return b == kGuard; };
    const auto begin = image_.begin() + static_cast<std::ptrdiff_t>(mirror.at);
    const auto end = begin + static_cast<std::ptrdiff_t>(mirror.bytes);
    const bool intact = std::all_of(begin - static_cast<std::ptrdiff_t>(kGuardBytes), begin, is_guard) &&
                        std::all_of(end, end + static_cast<std::ptrdiff_t>(kGuardBytes), is_guard);
    if (!intact) broken_ += (broken_.empty() ? "" : ", ") + name;
  }
}

Status DeviceCall::run(const std::string& backend) {
  if (Status status = prepare(backend); !status.ok()) return status;
  upload();
  Status status = launch(test_stream());
  const cudaError_t error = cudaStreamSynchronize(test_stream());
  if (status.ok() && error != cudaSuccess) {
    status = {StatusCode::kInternal, std::string("the kernels fail: ") + cudaGetErrorString(error)};
  }
  if (!status.ok()) return status;
  download();
  if (!broken_.empty()) return {StatusCode::kInternal, "written outside of: " + broken_};
  return {};
}

std::string missing_cuda() {
  Call call{Case{}};
  Problem problem;
  if (Status status = validate(call.arguments, call.attributes, problem); !status.ok()) return status.message();
  PlanOptions options;
  options.device = DeviceKind::kCuda;
  std::string refusal = "this build has no CUDA backends";
  for (const Verdict& verdict : explain(problem, options)) {
    // The last backend takes every legal call, where there is a device.
    if (verdict.refusal.empty()) return {};
    refusal = verdict.refusal;
  }
  return refusal;
}

std::vector<std::string> cuda_backends(const Call& call) {
  Problem problem;
  const Status status = validate(call.arguments, call.attributes, problem);
  EXPECT_TRUE(status.ok()) << status.message() << "\n" << to_string(call.spec());
  if (!status.ok()) return {};
  PlanOptions options;
  options.device = DeviceKind::kCuda;
  std::vector<std::string> accepting;
  for (const Verdict& verdict : explain(problem, options)) {
    if (verdict.refusal.empty()) accepting.push_back(verdict.backend);
  }
  EXPECT_FALSE(accepting.empty()) << "no backend takes the legal call " << to_string(call.spec());
  return accepting;
}

Arithmetic cuda_arithmetic(const Case& spec) {
  if (spec.type == ElementType::kFloat32) return {};
  const CacheType type = format_of(spec.type);
  const bool altered = spec.qk_norm || spec.rotary != Rotary::kNone || spec.k_quant == QuantType::kPerChannel;
  Arithmetic arithmetic;
  arithmetic.query_roundoff = altered ? unit_roundoff(type) : 0.0;
  arithmetic.weight_roundoff = unit_roundoff(type);
  arithmetic.weight_floor = smallest_positive(type) / 2.0;
  return arithmetic;
}

::testing::AssertionResult judge_on_cuda(Call& call, const std::string& backend, Placement placement) {
  const Call::Snapshot before = call.snapshot();
  DeviceCall device(call, placement);
  const Status status = device.run(backend);
  if (!status.ok()) {
    return ::testing::AssertionFailure() << backend << " fails: " << status.message() << "\n" << to_string(call.spec());
  }
  const Report report = compare(call, before, cuda_arithmetic(call.spec()));
  if (report.ok()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << backend << " differs from the oracle in " << to_string(call.spec()) << "\n"
                                       << report.text();
}

void run_on_cuda(Call& call, const std::string& backend) {
  DeviceCall device(call);
  const Status status = device.run(backend);
  EXPECT_TRUE(status.ok()) << backend << ": " << status.message() << "\n" << to_string(call.spec());
}

}  // namespace octavo::testing
