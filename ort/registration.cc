// RegisterCustomOps: what a session calls to get com.microsoft::PagedAttention from this library. A custom operator of
// that name and domain replaces the built-in one.
#include <array>
#include <charconv>
#include <iterator>
#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "ort/api.h"
#include "ort/config.h"
#include "ort/device.h"
#include "ort/kernel.h"
#include "ort/shape_inference.h"
#include "ort/tensors.h"

namespace octavo::ort {
namespace {

constexpr const char* kDomain = "com.microsoft";
constexpr const char* kName = "PagedAttention";
constexpr int kMinRuntimeMinor = 23;  // of 1.x, as the next
// 1.23 to 1.27 abort when a node with a shape inference function leaves out an optional input; they infer types without
// one.
constexpr int kMinMinorWithShapeInference = 28;

// The execution providers that get kernels. A runtime without one of them ignores its kernels.
struct Provider {
  const char* name;
  MakeDevice make_device;
};
constexpr Provider kProviders[] = {
    {"CPUExecutionProvider", make_cpu_device},
#if OCTAVO_CUDA
    {"CUDAExecutionProvider", make_cuda_device},
#endif
};

// One combination of element types. ONNX Runtime takes one kernel per combination and chooses by the types of a node's
// inputs.
struct Types {
  ElementType tensor;       // T
  ElementType key_cache;    // T_CACHE of inputs 3 and output 1
  ElementType value_cache;  // T_CACHE of input 4 and output 2; any in LATENT, which has neither
};

constexpr std::array kTensorTypes = {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16};
constexpr std::array kCacheTypes = {ElementType::kFloat32, ElementType::kFloat16,      ElementType::kBFloat16,
                                    ElementType::kInt8,    ElementType::kFloat8E4M3FN, ElementType::kUint8};

// A float cache holds T, or a narrower type under float32; the quantised ones go with every T.
constexpr bool is_cache_of(ElementType cache, ElementType tensor) {
  const bool is_float =
      cache == ElementType::kFloat32 || cache == ElementType::kFloat16 || cache == ElementType::kBFloat16;
  return !is_float || cache == tensor || tensor == ElementType::kFloat32;
}

// One OrtCustomOp of the library.
struct PagedAttentionOp : OrtCustomOp {
  const OrtApi* api;
  const Config* config;
  const Provider* provider;
  Types types;
};

const PagedAttentionOp& self(const OrtCustomOp* op) noexcept {
  return *static_cast<const PagedAttentionOp*>(op);
}

ONNXTensorElementDataType input_type(const OrtCustomOp* op, std::size_t index) noexcept {
  const Types& types = self(op).types;
  switch (index) {
    case kKeyCache: return onnx_type(types.key_cache);
    case kValueCache: return onnx_type(types.value_cache);
    case kCumulativeSequenceLength:
    case kPastSeqlens:
    case kBlockTable:
    case kSlotMapping:
    case kAttentionMetadata:
    case kQueryPositions: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
    case kKScale:
    case kVScale: return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    default: return onnx_type(types.tensor);
  }
}

ONNXTensorElementDataType output_type(const OrtCustomOp* op, std::size_t index) noexcept {
  const Types& types = self(op).types;
  switch (index) {
    case kKeyCacheOut: return onnx_type(types.key_cache);
    case kValueCacheOut: return onnx_type(types.value_cache);
    // No input decides output_qk's type, and kernels that differ in nothing else are refused as duplicates: any type
    // here, checked when the kernel is created.
    case kOutputQk: return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    default: return onnx_type(types.tensor);
  }
}

bool is_required_input(std::size_t index) noexcept {
  return index == kQuery || index == kKeyCache || index == kCumulativeSequenceLength || index == kPastSeqlens ||
         index == kBlockTable;
}

// Output i may reuse the buffer of input i + 2 where that is the input's last use, so that a cache which flows through
// several nodes is not copied. (An alias map would share the buffer unconditionally, also with later readers of the old
// cache.)
std::size_t may_inplace(int** inputs, int** outputs) noexcept {
  static int cache_inputs[] = {kKeyCache, kValueCache};
  static int cache_outputs[] = {kKeyCacheOut, kValueCacheOut};
  *inputs = cache_inputs;
  *outputs = cache_outputs;
  return std::size(cache_inputs);
}

PagedAttentionOp make_op(const OrtApi& api, const Config& config, const Provider& provider, const Types& types,
                         bool infers_shapes) noexcept {
  PagedAttentionOp op{};
  op.api = &api;
  op.config = &config;
  op.provider = &provider;
  op.types = types;
  op.version = kApiVersion;
  op.GetName = [](const OrtCustomOp*) noexcept { return kName; };
  op.GetExecutionProviderType = [](const OrtCustomOp* op_) noexcept { return self(op_).provider->name; };
  op.GetInputTypeCount = [](const OrtCustomOp*) noexcept -> std::size_t { return kInputCount; };
  op.GetInputType = input_type;
  op.GetInputCharacteristic = [](const OrtCustomOp*, std::size_t index) noexcept {
    return is_required_input(index) ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  };
  op.GetInputMemoryType = [](const OrtCustomOp*, std::size_t index) noexcept {
    return index == kAttentionMetadata ? OrtMemTypeCPUInput : OrtMemTypeDefault;
  };
  op.GetOutputTypeCount = [](const OrtCustomOp*) noexcept -> std::size_t { return kOutputCount; };
  op.GetOutputType = output_type;
  op.GetOutputCharacteristic = [](const OrtCustomOp*, std::size_t index) noexcept {
    return index == kOutput ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  };
  op.GetVariadicInputMinArity = [](const OrtCustomOp*) noexcept { return 0; };
  op.GetVariadicInputHomogeneity = [](const OrtCustomOp*) noexcept { return 0; };
  op.GetVariadicOutputMinArity = [](const OrtCustomOp*) noexcept { return 0; };
  op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) noexcept { return 0; };
  op.GetStartVersion = [](const OrtCustomOp*) noexcept { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) noexcept { return std::numeric_limits<int>::max(); };
  op.GetMayInplace = may_inplace;
  op.ReleaseMayInplace = [](int*, int*) noexcept {};  // they are constants of this file
  op.CreateKernelV2 = [](const OrtCustomOp* op_, const OrtApi*, const OrtKernelInfo* info,
                         void** out) noexcept -> OrtStatus* {
    const OrtApi& api_ = *self(op_).api;
    return guarded(api_, [&]() -> Status {
      std::unique_ptr<Kernel> kernel;
      Status status = Kernel::create(api_, *self(op_).config, self(op_).provider->make_device, info, kernel);
      *out = kernel.release();
      if (status.code() != StatusCode::kInvalidArgument) return status;
      // While a session is made, ONNX Runtime turns every code into RUNTIME_EXCEPTION and drops the node's name.
      return Status::invalid_argument("INVALID_ARGUMENT: PagedAttention node \"" + node_name(api_, info) +
                                      "\": " + status.message());
    });
  };
  op.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) noexcept -> OrtStatus* {
    Kernel& target = *static_cast<Kernel*>(kernel);
    return guarded(target.api(), [&] { return target.compute(context); });
  };
  op.KernelDestroy = [](void* kernel) noexcept { delete static_cast<Kernel*>(kernel); };
  if (infers_shapes) {
    op.InferOutputShapeFn = [](const OrtCustomOp* op_, OrtShapeInferContext* context) noexcept -> OrtStatus* {
      return infer_output_shapes(*self(op_).api, context);
    };
  }
  return op;
}

// The operators as one session configuration of one runtime sees them. Sessions keep raw pointers to them, and may
// outlive dlclose and static destructors, so they are never freed: there is one set per configuration, not one per
// session, and the library stays mapped (-z nodelete).
class OperatorSet {
 public:
  static Status find_or_make(const OrtApi& api, const Config& config, bool infers_shapes, const OperatorSet*& found) {
    static std::mutex mutex;
    static auto& sets = *new std::list<OperatorSet>();
    const std::lock_guard lock(mutex);
    for (const OperatorSet& set : sets) {
      if (&set.api_ == &api && set.config_ == config) {
        found = &set;
        return {};
      }
    }
    sets.emplace_back(api, config);
    Status status = sets.back().fill(infers_shapes);
    if (status.ok()) {
      found = &sets.back();
    } else {
      sets.pop_back();
    }
    return status;
  }

  OperatorSet(const OrtApi& api, const Config& config) : api_(api), config_(config) {}
  ~OperatorSet() {
    if (domain_ != nullptr) api_.ReleaseCustomOpDomain(domain_);
  }
  OperatorSet(const OperatorSet&) = delete;
  OperatorSet& operator=(const OperatorSet&) = delete;

  OrtCustomOpDomain* domain() const noexcept { return domain_; }

 private:
  Status fill(bool infers_shapes) {
    for (const Provider& provider : kProviders) {
      for (const ElementType tensor : kTensorTypes) {
        for (const ElementType key_cache : kCacheTypes) {
          for (const ElementType value_cache : kCacheTypes) {
            if (!is_cache_of(key_cache, tensor) || !is_cache_of(value_cache, tensor)) continue;
            ops_.push_back(make_op(api_, config_, provider, {tensor, key_cache, value_cache}, infers_shapes));
          }
        }
      }
    }
    Status status = from_ort_status(api_, api_.CreateCustomOpDomain(kDomain, &domain_), "creating the operator domain");
    for (PagedAttentionOp& op : ops_) {
      if (status.ok()) status = from_ort_status(api_, api_.CustomOpDomain_Add(domain_, &op), "adding PagedAttention");
    }
    return status;
  }

  const OrtApi& api_;
  const Config config_;
  std::list<PagedAttentionOp> ops_;
  OrtCustomOpDomain* domain_ = nullptr;
};

// The y of version "1.y.z"; a later major version counts as later than every y.
int runtime_minor(std::string_view version) noexcept {
  int major = 0;
  int minor = 0;
  const char* end = version.data() + version.size();
  const auto after_major = std::from_chars(version.data(), end, major);
  if (after_major.ec != std::errc{} || after_major.ptr == end) return 0;
  static_cast<void>(std::from_chars(after_major.ptr + 1, end, minor));
  return major == 1 ? minor : major > 1 ? std::numeric_limits<int>::max() : 0;
}

}  // namespace
}  // namespace octavo::ort

extern "C" __attribute__((visibility("default"))) OrtStatus* ORT_API_CALL
RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) noexcept {
  using namespace octavo::ort;
  const std::string_view version = base->GetVersionString();
  const int minor = runtime_minor(version);
  const OrtApi* api = minor >= kMinRuntimeMinor ? base->GetApi(kApiVersion) : nullptr;
  if (api == nullptr) {
    // CreateStatus is the first entry of every version of the table, so version 1 can report.
    return base->GetApi(1)->CreateStatus(ORT_NOT_IMPLEMENTED, ("octavo needs onnxruntime 1.23 or later, this is " +
                                                               std::string(version) + ": install a later onnxruntime")
                                                                  .c_str());
  }
  return guarded(*api, [&]() -> octavo::Status {
    // ONNX Runtime refuses one domain twice in a session ("Domain already set in registry"), which helpers and
    // configuration files bring about together: the second registration of the same options does nothing.
    constexpr const char* kMark = "octavo.registered";
    int registered = 0;
    octavo::Status status = from_ort_status(*api, api->HasSessionConfigEntry(options, kMark, &registered), kMark);
    if (!status.ok() || registered != 0) return status;
    Config config;
    status = read_config(*api, options, config);
    if (!status.ok()) return status;
    const OperatorSet* set = nullptr;
    status = OperatorSet::find_or_make(*api, config, minor >= kMinMinorWithShapeInference, set);
    if (!status.ok()) return status;
    status =
        from_ort_status(*api, api->AddCustomOpDomain(options, set->domain()), "adding PagedAttention to the session");
    if (!status.ok()) return status;
    return from_ort_status(*api, api->AddSessionConfigEntry(options, kMark, "1"), kMark);
  });
}
