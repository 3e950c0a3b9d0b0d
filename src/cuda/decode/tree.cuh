// Partial results of attention and the order in which they are folded.
//
// The segments of a sequence are the leaves of a binary tree: node (level, i) covers segments [i * 2^level,
// (i + 1) * 2^level), and a node without a right child is its left one. A block may hold any aligned run of leaves and
// whoever merges the runs continues the tree, so that the bits do not depend on the length of the runs.
#pragma once

#include <cmath>
#include <cstdint>

namespace octavo::cuda::decode {

__device__ inline float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Four channels of a row's sums, relative to its maximum. Logits are in base 2.
struct Node {
  float4 sum{0.0f, 0.0f, 0.0f, 0.0f};
  float maximum = -INFINITY;
  float weight = 0.0f;
};

// `a` has the smaller keys. Every step is rounded by itself, so that no compiler makes two versions differ.
__device__ inline Node fold(const Node& a, const Node& b) {
  Node c;
  c.maximum = fmaxf(a.maximum, b.maximum);
  const float reference = c.maximum == -INFINITY ? 0.0f : c.maximum;
  const float of_a = exp2_approximate(__fsub_rn(a.maximum, reference));
  const float of_b = exp2_approximate(__fsub_rn(b.maximum, reference));
  c.weight = __fmaf_rn(b.weight, of_b, __fmul_rn(a.weight, of_a));
  c.sum.x = __fmaf_rn(b.sum.x, of_b, __fmul_rn(a.sum.x, of_a));
  c.sum.y = __fmaf_rn(b.sum.y, of_b, __fmul_rn(a.sum.y, of_a));
  c.sum.z = __fmaf_rn(b.sum.z, of_b, __fmul_rn(a.sum.z, of_a));
  c.sum.w = __fmaf_rn(b.sum.w, of_b, __fmul_rn(a.sum.w, of_a));
  return c;
}

// Folds leaves as they come. `load(level)` and `store(level, node)` keep one node a level, of `levels`. With more than
// 2^levels leaves the last level takes the rest in order.
template <typename Load, typename Store>
__device__ inline Node push(Node node, std::uint32_t index, bool last, int levels, Load&& load, Store&& store) {
  int level = 0;
  for (; level < levels - 1; ++level) {
    if ((index >> level & 1u) != 0) {
      node = fold(load(level), node);
    } else if (!last) {
      break;
    }
  }
  if (level == levels - 1 && index >> level != 0) node = fold(load(level), node);
  if (!last) store(level, node);
  return node;
}

}  // namespace octavo::cuda::decode
