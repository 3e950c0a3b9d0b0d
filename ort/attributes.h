// The node's attributes and its set of outputs, read once when a session creates the kernel.
#pragma once

#include "octavo/paged_attention.h"
#include "ort/api.h"

namespace octavo::ort {

// Empty for a node without a name.
std::string node_name(const OrtApi& api, const OrtKernelInfo* info);

// An absent attribute keeps the default of octavo::Attributes (ONNX Runtime reports it as an error to custom operators
// instead of supplying the schema's default). Errors: kInvalidArgument for a missing required attribute, an attribute
// of another type, and a string outside its vocabulary; ranges of numbers are octavo::validate()'s.
Status read_attributes(const OrtApi& api, const OrtKernelInfo* info, Attributes& attributes);

// Which outputs the node names.
struct OutputSet {
  bool cache_outputs = false;  // key_cache_out and, in SEPARATE, value_cache_out
  bool output_qk = false;
  ElementType output_qk_type = ElementType::kUndefined;
};

// Errors: kInvalidArgument for combinations that the contract excludes.
Status read_outputs(const OrtApi& api, const OrtKernelInfo* info, const Attributes& attributes, OutputSet& outputs);

}  // namespace octavo::ort
