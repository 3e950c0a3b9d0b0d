// One head's row of Q or K before it is used or stored: RMS norm, then RoPE. One warp works on one row in shared
// memory.
#pragma once

#include <cstdint>

#include "cuda/call.h"
#include "cuda/device/element.cuh"

namespace octavo::cuda {

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// For each of `count` rows: row[c] *= weight[c] / sqrt(mean(row^2) + epsilon), then the rotation of `position`.
// `weight` is nullptr without the norm. Starts and ends with the warp in step on the rows.
template <typename T>
__device__ inline void prepare_rows(const Call& call, const void* weight, std::int64_t position, int count,
                                    float* rows) {
  const int lane = threadIdx.x % 32;
  const int width = call.head_size;
  __syncwarp();
  for (int r = 0; weight != nullptr && r < count; ++r) {
    float* row = rows + r * width;
    float squares = 0.0f;
    for (int c = lane; c < width; c += 32) squares += row[c] * row[c];
    const float mean = warp_sum(squares) / static_cast<float>(width);
    const float factor = 1.0f / sqrtf(mean + call.norm_epsilon);
    for (int c = lane; c < width; c += 32) row[c] = row[c] * factor * to_float(static_cast<const T*>(weight)[c]);
  }
  __syncwarp();
  if (call.cos == nullptr) return;
  const int half = call.rotary_half;
  const int step = call.rotary_interleaved ? 2 : 1;
  const int distance = call.rotary_interleaved ? 1 : half;
  const T* cosines = static_cast<const T*>(call.cos) + position * half;
  const T* sines = static_cast<const T*>(call.sin) + position * half;
  for (int i = lane; i < half; i += 32) {
    const float cosine = to_float(cosines[i]);
    const float sine = to_float(sines[i]);
    float* pair = rows + call.rotary_offset + i * step;
    for (int r = 0; r < count; ++r, pair += width) {
      const float a = pair[0];
      const float b = pair[distance];
      pair[0] = a * cosine - b * sine;
      pair[distance] = b * cosine + a * sine;
    }
  }
  __syncwarp();
}

}  // namespace octavo::cuda
