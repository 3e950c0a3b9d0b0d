// The two matrix products of attention on tiles in shared memory: scores = Q K^T, and sums += weights * V with the sums
// in registers. One policy for tensor cores (16-bit types), one for float32.
#pragma once

#include <cstdint>

#include "cuda/device/element.cuh"
#include "cuda/device/tensor_core.cuh"
#include "cuda/general/shared_memory.h"

namespace octavo::cuda {

template <typename T, int kBucket, int kRows, int kKeys, int kWarps>
struct TensorCoreProducts {
  // Warps stand side by side over V's channels first; what is left of them shares out the rows.
  static constexpr int kAcross = kWarps < kBucket / 16 ? kWarps : kBucket / 16;
  static constexpr int kDown = kWarps / kAcross;
  static constexpr int kRowTiles = kRows / 16 / kDown;     // 16-row tiles of a warp
  static constexpr int kColumns = kBucket / 16 / kAcross;  // 16-channel columns of a warp
  static_assert(kAcross * kDown == kWarps && kRowTiles * kDown * 16 == kRows && kColumns * kAcross * 16 == kBucket);

  float sums[kRowTiles][kColumns][2][4];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kRowTiles * kColumns * 8; ++i) (&sums[0][0][0][0])[i] = 0.0f;
  }

  // A warp takes 16 rows x 16 keys at a time; tiles without live rows are left as they are.
  __device__ static void score(const SharedLayout& layout, const T* query, const T* keys, int width, int live_rows,
                               float* scores) {
    constexpr int kTilesDown = kRows / 16;
    const int lane = threadIdx.x % 32;
    for (int tile = threadIdx.x / 32; tile < kTilesDown * (kKeys / 16); tile += kWarps) {
      const int row = tile % kTilesDown * 16;
      const int key = tile / kTilesDown * 16;
      if (row >= live_rows) continue;
      float c[2][4] = {};
      const T* a_row = query + (row + lane % 16) * layout.row_stride + lane / 16 * 8;
      const T* b_row = keys + (key + lane % 8 + lane / 16 * 8) * layout.row_stride + lane / 8 % 2 * 8;
#pragma unroll 4
      for (int channel = 0; channel < width; channel += 16) {
        std::uint32_t a[4], b[4];
        load_matrices(a, shared_address(a_row + channel));
        load_matrices(b, shared_address(b_row + channel));
        multiply_add<T>(c[0], a, b[0], b[1]);
        multiply_add<T>(c[1], a, b[2], b[3]);
      }
      float* to = scores + (row + lane / 4) * layout.score_stride + key + lane % 4 * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<float2*>(to + half * 8) = make_float2(c[half][0], c[half][1]);
        *reinterpret_cast<float2*>(to + half * 8 + 8 * layout.score_stride) = make_float2(c[half][2], c[half][3]);
      }
    }
  }

  __device__ void accumulate(const SharedLayout& layout, const T* weights, const T* values, int width, int live_rows,
                             const float* corrections) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int first_row = warp / kAcross * kRowTiles * 16;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const float upper = corrections[first_row + m * 16 + lane / 4];
      const float lower = corrections[first_row + m * 16 + lane / 4 + 8];
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[m][n][i / 4][i % 4] *= i % 4 < 2 ? upper : lower;
      }
    }
#pragma unroll
    for (int key = 0; key < kKeys; key += 16) {
      std::uint32_t a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const int row = first_row + m * 16;
        if (row < live_rows)
          load_matrices(a[m], shared_address(weights + (row + lane % 16) * layout.weight_stride + key + lane / 16 * 8));
      }
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        const int column = (warp % kAcross + n * kAcross) * 16;
        if (column >= width) continue;
        std::uint32_t b[4];
        load_matrices_transposed(
            b, shared_address(values + (key + lane % 16) * layout.value_stride + column + lane / 16 * 8));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          if (first_row + m * 16 >= live_rows) continue;
          multiply_add<T>(sums[m][n][0], a[m], b[0], b[1]);
          multiply_add<T>(sums[m][n][1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // Calls emit(row, channel, sum) for every sum of this thread; rows and channels may lie past the live ones.
  template <typename Emit>
  __device__ void for_each(const Emit& emit) const {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int row = (warp / kAcross * kRowTiles + m) * 16 + lane / 4 + i % 4 / 2 * 8;
          const int column = (warp % kAcross + n * kAcross) * 16 + i / 4 * 8 + lane % 4 * 2 + i % 2;
          emit(row, column, sums[m][n][i / 4][i % 4]);
        }
      }
    }
  }
};

template <int kBucket, int kRows, int kKeys, int kWarps>
struct FloatProducts {
  static constexpr int kThreads = kWarps * 32;
  // Scores: a thread has one key and every kRowGroups-th block of rows.
  static constexpr int kRowGroups = kThreads / kKeys;
  static constexpr int kScoreRows = kRows / kRowGroups;
  // Sums: a thread has kColumns channels of kSumRows rows.
  static constexpr int kAcross = kThreads < kBucket ? kThreads : kBucket;
  static constexpr int kDown = kThreads / kAcross;
  static constexpr int kSumRows = kRows / kDown;
  static constexpr int kColumns = kBucket / kAcross;
  static_assert(kScoreRows * kRowGroups == kRows && kSumRows * kDown == kRows && kColumns * kAcross == kBucket);

  float sums[kSumRows][kColumns];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kSumRows * kColumns; ++i) (&sums[0][0])[i] = 0.0f;
  }

  __device__ static void score(const SharedLayout& layout, const float* query, const float* keys, int width,
                               int /*live_rows*/, float* scores) {
    const int key = threadIdx.x % kKeys;
    const int first_row = threadIdx.x / kKeys * kScoreRows;
    float dot[kScoreRows] = {};
    for (int channel = 0; channel < width; channel += 4) {
      const float4 k = *reinterpret_cast<const float4*>(keys + key * layout.row_stride + channel);
#pragma unroll
      for (int r = 0; r < kScoreRows; ++r) {
        const float4 q = *reinterpret_cast<const float4*>(query + (first_row + r) * layout.row_stride + channel);
        dot[r] = fmaf(q.x, k.x, dot[r]);
        dot[r] = fmaf(q.y, k.y, dot[r]);
        dot[r] = fmaf(q.z, k.z, dot[r]);
        dot[r] = fmaf(q.w, k.w, dot[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < kScoreRows; ++r) scores[(first_row + r) * layout.score_stride + key] = dot[r];
  }

  __device__ void accumulate(const SharedLayout& layout, const float* weights, const float* values, int width,
                             int /*live_rows*/, const float* corrections) {
    const int first_row = threadIdx.x / kAcross * kSumRows;
    const int first_column = threadIdx.x % kAcross;
#pragma unroll
    for (int r = 0; r < kSumRows; ++r) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) sums[r][n] *= corrections[first_row + r];
    }
    for (int key = 0; key < kKeys; ++key) {
      float v[kColumns];
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        const int column = first_column + n * kAcross;
        v[n] = column < width ? values[key * layout.value_stride + column] : 0.0f;
      }
#pragma unroll
      for (int r = 0; r < kSumRows; ++r) {
        const float weight = weights[(first_row + r) * layout.weight_stride + key];
#pragma unroll
        for (int n = 0; n < kColumns; ++n) sums[r][n] = fmaf(weight, v[n], sums[r][n]);
      }
    }
  }

  template <typename Emit>
  __device__ void for_each(const Emit& emit) const {
#pragma unroll
    for (int r = 0; r < kSumRows; ++r) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        emit(static_cast<int>(threadIdx.x) / kAcross * kSumRows + r,
             static_cast<int>(threadIdx.x) % kAcross + n * kAcross, sums[r][n]);
      }
    }
  }
};

}  // namespace octavo::cuda
