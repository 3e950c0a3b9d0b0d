#include "ort/attributes.h"

#include <array>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "ort/tensors.h"

namespace octavo::ort {
namespace {

class AttributeReader {
 public:
  AttributeReader(const OrtApi& api, const OrtKernelInfo* info) noexcept : api_(api), info_(info) {}

  Status read(const char* name, std::int64_t& value) const {
    std::int64_t found = 0;
    if (!succeeded(api_, api_.KernelInfoGetAttribute_int64(info_, name, &found)))
      return absent_or_wrong_type(name, "an int");
    value = found;
    return {};
  }

  Status read(const char* name, float& value) const {
    float found = 0.0f;
    if (!succeeded(api_, api_.KernelInfoGetAttribute_float(info_, name, &found)))
      return absent_or_wrong_type(name, "a float");
    value = found;
    return {};
  }

  // One of `vocabulary`, whose names are those that octavo::name() gives. `rule` is the contract's id for it.
  template <typename Enum>
  Status read(const char* attribute, std::span<const Enum> vocabulary, const char* rule, Enum& value) const {
    const std::optional<std::string> text = string_attribute(attribute);
    if (!text) return absent_or_wrong_type(attribute, "a string");
    std::string allowed;
    for (const Enum candidate : vocabulary) {
      if (*text == name(candidate)) {
        value = candidate;
        return {};
      }
      allowed += (allowed.empty() ? "\"" : ", \"") + std::string(name(candidate)) + "\"";
    }
    return Status::invalid_argument(std::string(attribute) + ": must be one of " + allowed + ", got \"" + *text +
                                    "\"; use one of these spellings [" + rule + "]");
  }

  bool has_int(const char* name) const {
    std::int64_t ignored = 0;
    return succeeded(api_, api_.KernelInfoGetAttribute_int64(info_, name, &ignored));
  }

 private:
  std::optional<std::string> string_attribute(const char* name) const {
    std::size_t size = 0;
    if (!succeeded(api_, api_.KernelInfoGetAttribute_string(info_, name, nullptr, &size))) return std::nullopt;
    std::string text(size, '\0');
    if (!succeeded(api_, api_.KernelInfoGetAttribute_string(info_, name, text.data(), &size))) return std::nullopt;
    text.resize(size > 0 ? size - 1 : 0);  // the size counts the terminating zero
    return text;
  }

  // ONNX Runtime gives the same kind of error for an absent attribute and for one of another type; only the first may
  // fall back to the default.
  Status absent_or_wrong_type(const char* name, const char* wanted) const {
    std::int64_t number = 0;
    float real = 0.0f;
    std::size_t size = 0;
    const char* got = nullptr;
    if (succeeded(api_, api_.KernelInfoGetAttribute_int64(info_, name, &number))) {
      got = "an int";
    } else if (succeeded(api_, api_.KernelInfoGetAttribute_float(info_, name, &real))) {
      got = "a float";
    } else if (string_attribute(name)) {
      got = "a string";
    } else if (succeeded(api_, api_.KernelInfoGetAttributeArray_int64(info_, name, nullptr, &size)) && size > 0) {
      got = "a list of ints";
    } else if (succeeded(api_, api_.KernelInfoGetAttributeArray_float(info_, name, nullptr, &size)) && size > 0) {
      got = "a list of floats";
    }
    if (got == nullptr) return {};
    return Status::invalid_argument(std::string(name) + ": must be " + wanted + ", got " + got +
                                    "; give the attribute that type in the model");
  }

  const OrtApi& api_;
  const OrtKernelInfo* info_;
};

// Keeps the first error of a sequence of reads.
class FirstError {
 public:
  void operator<<(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }
  Status take() { return std::move(status_); }

 private:
  Status status_;
};

constexpr std::array kQuantTypes = {QuantType::kNone, QuantType::kPerTensor, QuantType::kPerChannel};
constexpr std::array kLayouts = {CacheLayout::kSeparate, CacheLayout::kLatent};
constexpr std::array kCacheTypes = {CacheType::kTensorType, CacheType::kFloat32,   CacheType::kFloat16,
                                    CacheType::kBFloat16,   CacheType::kInt8,      CacheType::kFloat8E4M3FN,
                                    CacheType::kInt4,       CacheType::kFloat4E2M1};

}  // namespace

std::string node_name(const OrtApi& api, const OrtKernelInfo* info) {
  std::size_t size = 0;
  if (!succeeded(api, api.KernelInfo_GetNodeName(info, nullptr, &size))) return {};
  std::string text(size, '\0');
  if (!succeeded(api, api.KernelInfo_GetNodeName(info, text.data(), &size)) || size == 0) return {};
  text.resize(size - 1);  // the size counts the terminating zero
  return text;
}

Status read_attributes(const OrtApi& api, const OrtKernelInfo* info, Attributes& attributes) {
  attributes = Attributes();
  const AttributeReader reader(api, info);
  FirstError error;
  error << reader.read("num_heads", attributes.num_heads);
  error << reader.read("kv_num_heads", attributes.kv_num_heads);
  error << reader.read("scale", attributes.scale);
  error << reader.read("softcap", attributes.softcap);
  error << reader.read("local_window_size", attributes.local_window_size);
  error << reader.read("is_causal", attributes.is_causal);
  error << reader.read("do_rotary", attributes.do_rotary);
  error << reader.read("rotary_interleaved", attributes.rotary_interleaved);
  error << reader.read("rotary_offset", attributes.rotary_offset);
  error << reader.read("qk_norm_epsilon", attributes.qk_norm_epsilon);
  error << reader.read("k_quant_type", std::span<const QuantType>(kQuantTypes), "A12", attributes.k_quant_type);
  error << reader.read("v_quant_type", std::span<const QuantType>(kQuantTypes), "A12", attributes.v_quant_type);
  error << reader.read("k_cache_dtype", std::span<const CacheType>(kCacheTypes), "A13", attributes.k_cache_dtype);
  error << reader.read("v_cache_dtype", std::span<const CacheType>(kCacheTypes), "A13", attributes.v_cache_dtype);
  error << reader.read("kv_cache_layout", std::span<const CacheLayout>(kLayouts), "A14", attributes.kv_cache_layout);
  error << reader.read("v_head_size", attributes.v_head_size);
  error << reader.read("qk_output", attributes.qk_output);
  // An absent one would read as "got 0" in the contract's own words.
  for (const auto& [required, rule] : {std::pair("num_heads", "A1"), std::pair("kv_num_heads", "A2")}) {
    if (!reader.has_int(required)) {
      error << Status::invalid_argument(std::string(required) + ": is required and has no default, got none; set it [" +
                                        rule + "]");
    }
  }
  return error.take();
}

// Whether the model holds the input's value.
bool is_initializer(const OrtApi& api, const OrtKernelInfo* info, std::size_t input) {
  int constant = 0;
  const OrtValue* value = nullptr;
  return succeeded(api, api.KernelInfoGetConstantInput_tensor(info, input, &constant, &value)) && constant != 0;
}

Status read_outputs(const OrtApi& api, const OrtKernelInfo* info, const Attributes& attributes, OutputSet& outputs) {
  std::array<bool, kOutputCount> named{};
  std::size_t count = 0;
  Status status = from_ort_status(api, api.KernelInfo_GetOutputCount(info, &count), "counting the node's outputs");
  if (!status.ok()) return status;
  for (std::size_t index = 0; index < count && index < named.size(); ++index) {
    std::size_t size = 0;
    status =
        from_ort_status(api, api.KernelInfo_GetOutputName(info, index, nullptr, &size), "reading an output's name");
    if (!status.ok()) return status;
    named[index] = size > 1;  // the size counts the terminating zero; an output that is not wanted has an empty name
  }

  if (attributes.kv_cache_layout == CacheLayout::kLatent) {
    if (named[kValueCacheOut]) {
      return Status::invalid_argument(
          "value_cache_out: must be absent with kv_cache_layout = LATENT, which has one cache, got output 2; give that "
          "output an empty name");
    }
  } else if (named[kKeyCacheOut] != named[kValueCacheOut]) {
    return Status::invalid_argument(
        std::string("key_cache_out, value_cache_out: outputs 1 and 2 must be both present or both absent, got only ") +
        (named[kKeyCacheOut] ? "key_cache_out" : "value_cache_out") + "; name both or neither");
  }
  outputs.cache_outputs = named[kKeyCacheOut];
  if (!outputs.cache_outputs) {
    for (const std::size_t input : {kKeyCache, kValueCache}) {
      if (!is_initializer(api, info, input)) continue;
      return Status::invalid_argument(
          std::string(input == kKeyCache ? "key_cache" : "value_cache") +
          " must not be an initializer in a node without cache outputs, which updates it in place: each run would "
          "change the model's constant; make it a graph input, or name outputs 1 and 2");
    }
  }

  outputs.output_qk = named[kOutputQk];
  if (outputs.output_qk != (attributes.qk_output != 0)) {
    return Status::invalid_argument(std::string("output_qk: present exactly when qk_output is not 0; got output_qk ") +
                                    (outputs.output_qk ? "present" : "absent") + " with qk_output = " +
                                    std::to_string(attributes.qk_output) + "; change one of the two [M13]");
  }
  if (!outputs.output_qk) return {};

  OrtTypeInfo* type_info = nullptr;
  status =
      from_ort_status(api, api.KernelInfo_GetOutputTypeInfo(info, kOutputQk, &type_info), "reading output_qk's type");
  if (!status.ok()) return status;
  const OrtTensorTypeAndShapeInfo* tensor_info = nullptr;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  if (succeeded(api, api.CastTypeInfoToTensorInfo(type_info, &tensor_info)) && tensor_info != nullptr) {
    static_cast<void>(succeeded(api, api.GetTensorElementType(tensor_info, &type)));
  }
  api.ReleaseTypeInfo(type_info);
  outputs.output_qk_type = element_type(type);
  switch (outputs.output_qk_type) {
    case ElementType::kFloat32:
    case ElementType::kFloat16:
    case ElementType::kBFloat16: return {};
    default:
      return Status::invalid_argument(
          std::string("output_qk: must be declared as float32, float16 or bfloat16, got ") +
          (outputs.output_qk_type == ElementType::kUndefined ? "another type" : name(outputs.output_qk_type)) +
          "; change the type of that value in the graph [T7]");
  }
}

}  // namespace octavo::ort
