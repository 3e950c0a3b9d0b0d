// A paged cache as the copy engine of compute capability 9.0 sees it (device/tensor_copy.cuh).
#pragma once

#include <cuda.h>

#include "cuda/call.h"

namespace octavo::cuda {

// The box of a copy: `row_bytes` of each of `slots` consecutive slots of one block. In shared memory the rows stand 128
// bytes apart, 16-byte pieces exchanged by the swizzle of 128 bytes.
struct CacheBox {
  int row_bytes = 128;
  int slots = 0;
};

// Axes of the map: bytes of a row, slots, KV heads, blocks. With `joined`, rows of all heads follow each other on the
// first axis, and the third has one entry. False where the driver knows no such map or refuses this one.
bool make_tensor_map(const Call& call, const Cache& cache, const CacheBox& box, bool joined, CUtensorMap& map) noexcept;

}  // namespace octavo::cuda
