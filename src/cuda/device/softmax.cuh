// Softmax of one row: exponentials, and what turns its sums into outputs.
#pragma once

#include <cmath>

#include "cuda/device/element.cuh"

namespace octavo::cuda {

// exp for weights that meet V as T: the two-ulp instruction is far below the rounding of a 16-bit type.
template <typename T>
__device__ inline float exponential(float x) {
  if constexpr (sizeof(T) == 4) {
    return expf(x);
  } else {
    return __expf(x);
  }
}

// What scores are subtracted from: with nothing attended yet, any finite number keeps exp(-inf - reference) at 0 and
// lets a NaN score through.
__device__ inline float reference_of(float maximum) {
  return maximum == -INFINITY ? 0.0f : maximum;
}

struct RowEnd {
  float factor;  // of the row's sums; 0 for a row that attends to nothing
  float lse;
};

// `weight` is the sum of exp(score - maximum); `sink` points at the head's sink, nullptr without one.
template <typename T>
__device__ inline RowEnd end_row(float maximum, float weight, const T* sink) {
  if (weight == 0.0f) return {0.0f, -INFINITY};
  const float lse = maximum + logf(weight);
  if (sink == nullptr) return {1.0f / weight, lse};
  const float logit = to_float(*sink);
  const float reference = fmaxf(maximum, logit);
  const float numerator = expf(maximum - reference);
  return {numerator / (weight * numerator + expf(logit - reference)), lse};
}

}  // namespace octavo::cuda
