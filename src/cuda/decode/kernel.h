// The decode kernel as the backend launches it. One file per cache type compiles the instances.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/decode/shape.h"
#include "octavo/problem.h"

namespace octavo::cuda::decode {

// A compiled kernel: its cache type and its largest head; what its launch needs.
struct Instance {
  CacheType type = CacheType::kTensorType;
  int head = 0;
  int rows = 0, heads = 0, all_rows = 0;  // query rows a KV head, KV heads of a block, rows of them all
  int tile_keys = 0;
  int blocks_per_sm = 0;
  int (*shared_bytes)(int batch) = nullptr;
  cudaError_t (*launch)(const Call& call, const Work& work, const Maps& maps, cudaStream_t stream) = nullptr;
};

template <CacheType kType, int kHead, int kTiles>
int shared_bytes_of(int batch) {
  return layout_of<Shape<kType, kHead, kTiles>>(batch).bytes;
}

// Defined, for the instances of each cache type, in kernel_<type>.cu.
template <CacheType kType, int kHead, int kTiles>
cudaError_t launch_instance(const Call& call, const Work& work, const Maps& maps, cudaStream_t stream);

template <CacheType kType, int kHead, int kTiles>
constexpr Instance make_instance() {
  using S = Shape<kType, kHead, kTiles>;
  static_assert(layout_of<S>(kMaxBatch).bytes <= 227 * 1024);
  return {kType,
          kHead,
          S::kRows,
          S::kHeads,
          S::kAllRows,
          S::kTileKeys,
          S::kBlocksPerSm,
          shared_bytes_of<kType, kHead, kTiles>,
          launch_instance<kType, kHead, kTiles>};
}

}  // namespace octavo::cuda::decode
