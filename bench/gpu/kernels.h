// Kernels of the benchmark itself: random contents, the read stream that is the limit, attention in float64.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "octavo/problem.h"

namespace octavo::bench {

// Pseudo-random elements over `bytes` (a multiple of 16): floats about normal with deviation 1, int8 codes about normal
// with deviation 40, uniform 4-bit codes.
cudaError_t launch_fill(void* data, std::size_t bytes, CacheType type, std::uint32_t seed, cudaStream_t stream);

// Reads `bytes` (a multiple of 1 MiB) once, with `loads` (2, 4, 8 or 16) 16-byte loads a thread under way together, in
// blocks of `threads`. `streaming` marks what is read as not needed again. `sink` is 4 bytes.
struct ReadShape {
  int threads, loads;
  bool streaming;
};
cudaError_t launch_read(const void* data, std::size_t bytes, ReadShape shape, void* sink, cudaStream_t stream);

// Causal attention in float64, sharing no code with the library: one block a query row. What it reads is laid out as in
// octavo::Arguments; every sequence has `new_tokens` query tokens, the last of its `lengths`.
struct Reference {
  const void* query = nullptr;  // `type` (batch * new_tokens, num_heads, head_size)
  const void *k = nullptr, *v = nullptr;
  const float *k_scale = nullptr, *v_scale = nullptr;  // nullptr, (1) or (kv_num_heads, head_size)
  const std::int32_t *table = nullptr, *lengths = nullptr;
  double* output = nullptr;  // (batch * new_tokens, num_heads, head_size)
  CacheType cache = CacheType::kFloat16, type = CacheType::kFloat16;
  std::int64_t block_size = 0, columns = 0, window = -1, row_bytes = 0;  // row_bytes: of one head of the cache
  int batch = 0, num_heads = 0, kv_num_heads = 0, head_size = 0, new_tokens = 1;
  bool per_channel = false;
  double scale = 1.0, softcap = 0.0;
};
inline constexpr int kMaxReferenceHeadSize = 256;
cudaError_t launch_reference(const Reference& reference, cudaStream_t stream);

}  // namespace octavo::bench
