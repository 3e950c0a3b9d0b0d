#include "ort/tensors.h"

#include <algorithm>
#include <vector>

namespace octavo::ort {

ElementType element_type(ONNXTensorElementDataType type) noexcept {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT: return ElementType::kFloat32;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16: return ElementType::kFloat16;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16: return ElementType::kBFloat16;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN: return ElementType::kFloat8E4M3FN;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8: return ElementType::kInt8;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8: return ElementType::kUint8;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32: return ElementType::kInt32;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64: return ElementType::kInt64;
    default: return ElementType::kUndefined;
  }
}

ONNXTensorElementDataType onnx_type(ElementType type) noexcept {
  switch (type) {
    case ElementType::kFloat32: return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    case ElementType::kFloat16: return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
    case ElementType::kBFloat16: return ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
    case ElementType::kFloat8E4M3FN: return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN;
    case ElementType::kInt8: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
    case ElementType::kUint8: return ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
    case ElementType::kInt32: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
    case ElementType::kInt64: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
    case ElementType::kUndefined: break;
  }
  return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
}

Status view_of(const OrtApi& api, const OrtValue* value, MutableTensorView& view) {
  view = MutableTensorView();
  if (value == nullptr) return {};

  OrtTensorTypeAndShapeInfo* raw_info = nullptr;
  Status status =
      from_ort_status(api, api.GetTensorTypeAndShape(value, &raw_info), "reading a tensor's type and shape");
  if (!status.ok()) return status;
  const TypeAndShape info(raw_info, TypeAndShapeDeleter{&api});
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  std::size_t rank = 0;
  status = from_ort_status(api, api.GetTensorElementType(info.get(), &type), "reading a tensor's type");
  if (status.ok()) status = from_ort_status(api, api.GetDimensionsCount(info.get(), &rank), "reading a tensor's rank");
  if (!status.ok()) return status;
  view.type = element_type(type);
  view.rank = static_cast<int>(rank);
  if (rank <= view.shape.size()) {
    status = from_ort_status(api, api.GetDimensions(info.get(), view.shape.data(), rank), "reading a tensor's shape");
  } else {  // validation refuses the rank; it gets the leading extents for its message
    std::vector<std::int64_t> shape(rank);
    status = from_ort_status(api, api.GetDimensions(info.get(), shape.data(), rank), "reading a tensor's shape");
    std::copy_n(shape.begin(), view.shape.size(), view.shape.begin());
  }
  if (!status.ok()) return status;
  view.set_contiguous_strides();

  // The C API has no accessor for the data of a const OrtValue. Inputs other than the caches are only ever read.
  return from_ort_status(api, api.GetTensorMutableData(const_cast<OrtValue*>(value), &view.data),
                         "reading a tensor's data");
}

Status input_view(const OrtApi& api, const OrtKernelContext* context, std::size_t index, MutableTensorView& view) {
  const OrtValue* value = nullptr;
  Status status = from_ort_status(api, api.KernelContext_GetInput(context, index, &value), "reading an input");
  return status.ok() ? view_of(api, value, view) : status;
}

Status allocate_output(const OrtApi& api, OrtKernelContext* context, std::size_t index, MutableTensorView& view) {
  OrtValue* value = nullptr;
  Status status = from_ort_status(
      api, api.KernelContext_GetOutput(context, index, view.shape.data(), static_cast<std::size_t>(view.rank), &value),
      "allocating an output");
  if (!status.ok()) return status;
  if (value == nullptr)
    return {StatusCode::kInternal, "ONNX Runtime gave no buffer for output " + std::to_string(index)};
  return from_ort_status(api, api.GetTensorMutableData(value, &view.data), "reading an output's data");
}

}  // namespace octavo::ort
