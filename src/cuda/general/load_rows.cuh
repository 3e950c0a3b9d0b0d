// Cache rows of one key tile into shared memory as T, in two steps, so that the memory is read while the tile before is
// worked on: copied asynchronously where rows hold T already, through registers and the codec otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/device/codec.cuh"
#include "cuda/device/tensor_core.cuh"

namespace octavo::cuda {

// Row k starts at cache.data + offsets[k]; a negative offset means a row of zeros, and nothing is read. Channels from
// `width` to `padded` are zeros.
template <typename T, int kBucket, int kKeys, int kThreads>
struct RowLoader {
  static constexpr int kUnits = kBucket / kUnit;
  static constexpr int kPerThread = kKeys * kUnits / kThreads;
  static constexpr bool kFewUnits = kPerThread <= 8;  // registers for the codes of a whole tile
  static_assert(kPerThread * kThreads == kKeys * kUnits);

  uint2 codes[kFewUnits ? kPerThread : 1];

  // Rows of T at aligned places are copied; float32 is aligned to its elements, which is enough for narrower copies.
  __device__ static bool copies(const Cache& cache) {
    return holds<T>(cache.type) && (cache.aligned || sizeof(T) == 4);
  }
  // Narrow codes are fetched ahead.
  __device__ static bool fetches(const Cache& cache) { return kFewUnits && !is_float(cache.type); }

  // Copies of rows of T: the caller commits and waits for them, and passes a barrier.
  __device__ static void copy(const Cache& cache, const std::int64_t* offsets, int width, int padded, int stride,
                              T* to) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int unit = static_cast<int>(threadIdx.x) + i * kThreads;
      const int key = unit / kUnits;
      const int channel = unit % kUnits * kUnit;
      if (channel >= padded) continue;
      const std::int64_t offset = offsets[key];
      const bool valid = offset >= 0 && channel < width;
      const std::byte* from = cache.data + (valid ? offset + channel * static_cast<int>(sizeof(T)) : 0);
      T* const place = to + key * stride + channel;
      if (cache.aligned) {
#pragma unroll
        for (int word = 0; word < kUnit * static_cast<int>(sizeof(T)) / 16; ++word) {
          copy_async_16(reinterpret_cast<uint4*>(place) + word, from + 16 * word, valid);
        }
      } else if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int word = 0; word < kUnit; ++word) copy_async_4(place + word, from + 4 * word, valid);
      }
    }
  }

  // Starts to read narrow codes.
  __device__ void fetch(const Cache& cache, const std::int64_t* offsets, int width) {
    if constexpr (kFewUnits) {
      const int bytes = unit_bytes(cache.type);
      const bool whole_words = cache.aligned && bytes == 8;
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const int unit = static_cast<int>(threadIdx.x) + i * kThreads;
        const std::int64_t offset = offsets[unit / kUnits];
        if (offset < 0 || unit % kUnits * kUnit >= width) continue;
        const std::byte* from = cache.data + offset + unit % kUnits * bytes;
        if (whole_words) {
          codes[i] = *reinterpret_cast<const uint2*>(from);
        } else {
          const uint4 read = load_codes(cache.type, from, cache.aligned);
          codes[i] = make_uint2(read.x, read.y);
        }
      }
    }
  }

  // Stores fetched codes as T. `live` has a bit per key whose row is not zeros.
  __device__ void store(const Cache& cache, const std::int64_t* offsets, std::uint64_t live, int width, int padded,
                        int stride, T* to) const {
    if (!fetches(cache)) {
      read_and_store(cache, offsets, width, padded, stride, to);
      return;
    }
    if constexpr (kFewUnits) {
      switch (cache.type) {  // outside of the loop
        case CacheType::kInt8: store_codes<CacheType::kInt8>(live, width, padded, stride, to); return;
        case CacheType::kFloat8E4M3FN: store_codes<CacheType::kFloat8E4M3FN>(live, width, padded, stride, to); return;
        case CacheType::kInt4: store_codes<CacheType::kInt4>(live, width, padded, stride, to); return;
        default: store_codes<CacheType::kFloat4E2M1>(live, width, padded, stride, to); return;
      }
    }
  }

 private:
  template <CacheType kType>
  __device__ void store_codes(std::uint64_t live, int width, int padded, int stride, T* to) const {
#pragma unroll
    for (int i = 0; i < (kFewUnits ? kPerThread : 0); ++i) {
      const int unit = static_cast<int>(threadIdx.x) + i * kThreads;
      const int key = unit / kUnits;
      const int channel = unit % kUnits * kUnit;
      if (channel >= padded) continue;
      if ((live >> key & 1u) != 0 && channel < width) {
        decode_to(kType, make_uint4(codes[i].x, codes[i].y, 0, 0), to + key * stride + channel);
      } else {
        store_zeros(to + key * stride + channel);
      }
    }
  }

  // What cannot be fetched ahead: 16-bit rows under float32 or out of alignment, and tiles with more units than
  // registers.
  __device__ static void read_and_store(const Cache& cache, const std::int64_t* offsets, int width, int padded,
                                        int stride, T* to) {
    const int bytes = unit_bytes(cache.type);
#pragma unroll 4
    for (int i = 0; i < kPerThread; ++i) {
      const int unit = static_cast<int>(threadIdx.x) + i * kThreads;
      const int key = unit / kUnits;
      const int channel = unit % kUnits * kUnit;
      if (channel >= padded) continue;
      const std::int64_t offset = offsets[key];
      if (offset >= 0 && channel < width) {
        const uint4 read = load_codes(cache.type, cache.data + offset + unit % kUnits * bytes, cache.aligned);
        decode_to(cache.type, read, to + key * stride + channel);
      } else {
        store_zeros(to + key * stride + channel);
      }
    }
  }

  __device__ static void store_zeros(T* to) {
    const float zeros[kUnit] = {};
    store_unit(to, zeros);
  }
};

}  // namespace octavo::cuda
