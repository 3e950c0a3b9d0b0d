#include "cuda/tensor_map.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

namespace octavo::cuda {
namespace {

// The driver's function, found at run time: the library does not link the driver.
using Encode = decltype(&cuTensorMapEncodeTiled);

Encode find_encode() noexcept {
  constexpr unsigned kSince = 12000;  // CUDA 12.0
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, kSince, cudaEnableDefault, &result);
  if (error != cudaSuccess) cudaGetLastError();  // no later check must find it
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(found) : nullptr;
}

}  // namespace

bool make_tensor_map(const Call& call, const Cache& cache, const CacheBox& box, bool joined,
                     CUtensorMap& map) noexcept {
  static const Encode encode = find_encode();
  constexpr std::int64_t kMostEntries = std::int64_t{1} << 31;  // coordinates are signed
  constexpr std::int64_t kAlignment = 16;
  constexpr std::int64_t kMostStride = std::int64_t{1} << 40;
  if (encode == nullptr || call.num_blocks < 1 || call.num_blocks >= kMostEntries) return false;
  const std::int64_t head_row = row_bytes(cache.type, call.head_size);
  if (joined && call.kv_num_heads > 1 && cache.head_bytes != head_row) return false;
  const std::int64_t heads = joined ? 1 : call.kv_num_heads;
  const std::int64_t sizes[] = {joined ? head_row * call.kv_num_heads : head_row,
                                std::min(call.block_size, kMostEntries - 1), heads, call.num_blocks};
  const std::int64_t bytes[] = {cache.slot_bytes, cache.head_bytes, cache.block_bytes};
  cuuint64_t extents[4];
  cuuint64_t strides[3];
  if (sizes[0] >= kMostEntries || reinterpret_cast<std::uintptr_t>(cache.data) % kAlignment != 0) return false;
  for (int axis = 0; axis < 4; ++axis) extents[axis] = static_cast<cuuint64_t>(sizes[axis]);
  for (int axis = 0; axis < 3; ++axis) {
    const std::int64_t stride = sizes[axis + 1] > 1 ? bytes[axis] : kAlignment;  // of an axis of one: never used
    if (stride % kAlignment != 0 || stride <= 0 || stride >= kMostStride) return false;
    strides[axis] = static_cast<cuuint64_t>(stride);
  }
  const cuuint32_t extent_of_box[] = {static_cast<cuuint32_t>(box.row_bytes), static_cast<cuuint32_t>(box.slots), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, cache.data, extents, strides, extent_of_box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace octavo::cuda
