// Attention over the caches as the prologue left them. One file per element type compiles the instances.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/call.h"
#include "cuda/general/tuning.h"

namespace octavo::cuda {

// Blocks stand over (row tiles, KV heads, chunks of keys).
struct AttentionGrid {
  unsigned tiles, kv_heads, chunks;
  int shared_limit;  // bytes of shared memory that a block of the device can have
};

cudaError_t launch_attention_float32(const Call& call, const Instance& instance, AttentionGrid grid,
                                     cudaStream_t stream);
cudaError_t launch_attention_float16(const Call& call, const Instance& instance, AttentionGrid grid,
                                     cudaStream_t stream);
cudaError_t launch_attention_bfloat16(const Call& call, const Instance& instance, AttentionGrid grid,
                                      cudaStream_t stream);

// Folds the chunks of split rows; only for calls with more than one chunk. `split_tokens` bounds their tokens.
cudaError_t launch_merge(const Call& call, std::int64_t split_tokens, cudaStream_t stream);

}  // namespace octavo::cuda
