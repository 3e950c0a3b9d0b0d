#include "ort/shape_inference.h"

#include <optional>
#include <vector>

namespace octavo::ort {
namespace {

// Limits of rules A1 and Z4.
constexpr std::int64_t kMaxHeads = std::int64_t{1} << 20;
constexpr std::int64_t kMaxHeadSize = 1024;

struct Dimension {
  std::int64_t value = -1;  // < 0: unknown
  std::string symbol;
  bool known() const noexcept { return value >= 0 && symbol.empty(); }
};

struct Shape {
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  std::vector<Dimension> dimensions;
};

class Inference {
 public:
  Inference(const OrtApi& api, OrtShapeInferContext* context) noexcept : api_(api), context_(context) {}

  // Nothing for an absent input.
  std::optional<Shape> input(std::size_t index) const {
    std::size_t count = 0;
    OrtTensorTypeAndShapeInfo* info = nullptr;  // stays ONNX Runtime's
    if (!succeeded(api_, api_.ShapeInferContext_GetInputCount(context_, &count)) || index >= count) return std::nullopt;
    if (!succeeded(api_, api_.ShapeInferContext_GetInputTypeShape(context_, index, &info))) return std::nullopt;
    Shape shape;
    std::size_t rank = 0;
    if (!succeeded(api_, api_.GetTensorElementType(info, &shape.type)) ||
        shape.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED ||
        !succeeded(api_, api_.GetDimensionsCount(info, &rank))) {
      return std::nullopt;
    }
    std::vector<std::int64_t> values(rank);
    std::vector<const char*> symbols(rank, nullptr);
    if (!succeeded(api_, api_.GetDimensions(info, values.data(), rank)) ||
        !succeeded(api_, api_.GetSymbolicDimensions(info, symbols.data(), rank))) {
      return std::nullopt;
    }
    for (std::size_t axis = 0; axis < rank; ++axis) {
      shape.dimensions.push_back({values[axis], symbols[axis] == nullptr ? "" : symbols[axis]});
    }
    return shape;
  }

  std::optional<std::int64_t> int_attribute(const char* name) const {
    const OrtOpAttr* attribute = nullptr;
    std::int64_t value = 0;
    std::size_t size = 0;
    if (!succeeded(api_, api_.ShapeInferContext_GetAttribute(context_, name, &attribute)) ||
        !succeeded(api_, api_.ReadOpAttr(attribute, ORT_OP_ATTR_INT, &value, sizeof(value), &size))) {
      return std::nullopt;
    }
    return value;
  }

  // Nothing where rule A1 or A2 refuses the number, which the session reports when it makes the kernel.
  std::optional<std::int64_t> heads(const char* name) const {
    const std::optional<std::int64_t> number = int_attribute(name);
    return number && *number >= 1 && *number <= kMaxHeads ? number : std::nullopt;
  }

  bool is_latent() const {
    const OrtOpAttr* attribute = nullptr;
    char text[16] = {};
    std::size_t size = 0;
    return succeeded(api_, api_.ShapeInferContext_GetAttribute(context_, "kv_cache_layout", &attribute)) &&
           succeeded(api_, api_.ReadOpAttr(attribute, ORT_OP_ATTR_STRING, text, sizeof(text), &size)) &&
           std::string_view(text) == "LATENT";
  }

  // ONNX Runtime writes an unknown dimension without a name as the value -1, so a shape that has one is left out; the
  // element type is known to ONNX Runtime from the kernel's declaration.
  void set_output(std::size_t index, const Shape& shape) const {
    std::vector<std::int64_t> values;
    std::vector<const char*> symbols;
    for (const Dimension& dimension : shape.dimensions) {
      if (dimension.value < 0 && dimension.symbol.empty()) return;
      values.push_back(dimension.symbol.empty() ? dimension.value : -1);
      symbols.push_back(dimension.symbol.c_str());
    }
    OrtTensorTypeAndShapeInfo* raw_info = nullptr;
    if (!succeeded(api_, api_.CreateTensorTypeAndShapeInfo(&raw_info))) return;
    const TypeAndShape info(raw_info, TypeAndShapeDeleter{&api_});
    if (!succeeded(api_, api_.SetTensorElementType(info.get(), shape.type)) ||
        !succeeded(api_, api_.SetDimensions(info.get(), values.data(), values.size())) ||
        !succeeded(api_, api_.SetSymbolicDimensions(info.get(), symbols.data(), symbols.size()))) {
      return;
    }
    // Fails for an output that the node does not have.
    static_cast<void>(succeeded(api_, api_.ShapeInferContext_SetOutputTypeShape(context_, index, info.get())));
  }

 private:
  const OrtApi& api_;
  OrtShapeInferContext* context_;
};

// Output 0: (token_count, num_heads * effective_v_head_size). The attributes of a model that is being loaded may hold
// anything; within their limits no product here overflows.
void infer_output(const Inference& inference, const Shape& query) {
  if (query.dimensions.size() != 2) return;
  Shape output = query;
  Dimension& width = output.dimensions[1];
  const std::optional<std::int64_t> num_heads = inference.heads("num_heads");
  if (inference.is_latent()) {
    const std::int64_t v_head_size = inference.int_attribute("v_head_size").value_or(0);
    if (v_head_size != 0) {
      const bool plausible = num_heads && v_head_size > 0 && v_head_size <= kMaxHeadSize;
      width = plausible ? Dimension{*num_heads * v_head_size, ""} : Dimension{};
    }
  } else if (!inference.input(kKey) && !inference.input(kValue)) {
    const std::optional<std::int64_t> kv_num_heads = inference.heads("kv_num_heads");
    const std::int64_t heads = num_heads && kv_num_heads ? *num_heads + 2 * *kv_num_heads : 0;
    width = heads > 0 && width.known() && width.value % heads == 0 ? Dimension{width.value / heads * *num_heads, ""}
                                                                   : Dimension{};
  }
  inference.set_output(kOutput, output);
}

}  // namespace

OrtStatus* infer_output_shapes(const OrtApi& api, OrtShapeInferContext* context) noexcept {
  return guarded(api, [&]() -> Status {
    const Inference inference(api, context);
    if (const std::optional<Shape> query = inference.input(kQuery)) infer_output(inference, *query);
    if (const std::optional<Shape> key_cache = inference.input(kKeyCache))
      inference.set_output(kKeyCacheOut, *key_cache);
    if (const std::optional<Shape> value_cache = inference.input(kValueCache))
      inference.set_output(kValueCacheOut, *value_cache);
    return {};
  });
}

}  // namespace octavo::ort
