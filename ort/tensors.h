// OrtValue -> TensorView.
#pragma once

#include <span>

#include "octavo/tensor_view.h"
#include "ort/api.h"

namespace octavo::ort {

// kUndefined for a type that no tensor of the operator has.
ElementType element_type(ONNXTensorElementDataType type) noexcept;
ONNXTensorElementDataType onnx_type(ElementType type) noexcept;

// A view of the tensor; an absent one for a null `value` (an optional input that the node leaves out). The
// data may be written only in the caches, which the operator updates in place.
Status view_of(const OrtApi& api, const OrtValue* value, MutableTensorView& view);

// The node's input `index`, absent where the node has fewer inputs or an empty name there.
Status input_view(const OrtApi& api, const OrtKernelContext* context, std::size_t index, MutableTensorView& view);

// Makes ONNX Runtime provide output `index` with the shape of `view`, and points `view` at it.
Status allocate_output(const OrtApi& api, OrtKernelContext* context, std::size_t index, MutableTensorView& view);

}  // namespace octavo::ort
