#include <cmath>
#include <cstdint>

#include "cuda/device/head_row.cuh"
#include "cuda/device/sequences.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/general/kernel.h"
#include "cuda/launch.cuh"

namespace octavo::cuda {
namespace {

constexpr int kWarps = 8;
static_assert(kMaxChunks <= 32, "a lane holds the state of a chunk");

// A warp takes one token and query head: the chunks are folded in ascending order.
template <typename T>
__global__ void __launch_bounds__(kWarps * 32) merge(const __grid_constant__ Call call) {
  const int lane = threadIdx.x % 32;
  const std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const std::int64_t split_token = row / call.num_heads;
  const auto head = static_cast<int>(row % call.num_heads);
  const SequenceRecord* records = call.scratch.records;
  if (split_token >= records[call.batch_size].split_begin) return;
  const int sequence = warp_last_not_above(records, call.batch_size, &SequenceRecord::split_begin, split_token);
  const SequenceRecord record = records[sequence];
  const int chunks = chunks_of(call, record);
  if (chunks == 1) return;  // the attention kernel had the whole row

  const std::int64_t first_chunk = row * call.scratch.chunks;
  const float2 mine = lane < chunks ? call.scratch.states[first_chunk + lane] : make_float2(-INFINITY, 0.0f);
  const float maximum = warp_max(mine.x);
  const float factor = mine.y != 0.0f ? expf(mine.x - reference_of(maximum)) : 0.0f;
  const T* sink = call.sink != nullptr ? static_cast<const T*>(call.sink) + head : nullptr;
  const float weight = warp_sum(factor * mine.y);
  const RowEnd end = end_row(maximum, weight, sink);

  const std::int64_t token = record.start + (split_token - record.split_begin);
  const float* sums = call.scratch.sums + first_chunk * call.v_head_size;
  const int kv_head = head / call.group;
  const int width = call.v_head_size;
  T* output = static_cast<T*>(call.output) + (token * call.num_heads + head) * width;
  for (int base = 0; base < width; base += 32) {
    const int channel = base + lane;
    float sum = 0.0f;
    for (int c = 0; c < chunks; ++c) {
      const float f = __shfl_sync(0xffffffffu, factor, c);
      if (channel < width) sum = fmaf(f, sums[static_cast<std::int64_t>(c) * width + channel], sum);
    }
    if (channel >= width) continue;
    const float scale =
        end.factor * call.v_cache.tensor_scale() * call.v_cache.channel_scale(kv_head, channel, call.head_size);
    output[channel] = from_float<T>(weight != 0.0f ? sum * scale : 0.0f);
  }
  if (lane == 0 && call.lse != nullptr) call.lse[static_cast<std::int64_t>(head) * call.token_count + token] = end.lse;
}

}  // namespace

cudaError_t launch_merge(const Call& call, std::int64_t split_tokens, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((split_tokens * call.num_heads + kWarps - 1) / kWarps);
  switch (call.element_type) {
    case ElementType::kFloat16: return launch(merge<__half>, dim3(blocks), kWarps * 32, 0, stream, call);
    case ElementType::kBFloat16: return launch(merge<__nv_bfloat16>, dim3(blocks), kWarps * 32, 0, stream, call);
    default: return launch(merge<float>, dim3(blocks), kWarps * 32, 0, stream, call);
  }
}

}  // namespace octavo::cuda
