// The Cases that test_external.py checks the oracle on.
#pragma once

#include <vector>

#include "support/case.h"

namespace octavo::testing {

// An implementation of attention that others wrote, and whether it has every feature of the Case.
struct ExportedCase {
  Case spec;
  bool group_query_attention;  // ONNX Runtime's com.microsoft::GroupQueryAttention, on the CPU
  bool onnx_operators;         // ONNX's reference Attention, RotaryEmbedding, RMSNormalization and QuantizeLinear
};

std::vector<ExportedCase> exported_cases();

}  // namespace octavo::testing
