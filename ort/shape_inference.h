// Types and shapes of the outputs when a model is loaded.
#pragma once

#include "ort/api.h"

namespace octavo::ort {

// OrtCustomOp::InferOutputShapeFn. What is unknown stays unknown; nothing is an error here (ONNX Runtime drops the
// status).
OrtStatus* infer_output_shapes(const OrtApi& api, OrtShapeInferContext* context) noexcept;

}  // namespace octavo::ort
