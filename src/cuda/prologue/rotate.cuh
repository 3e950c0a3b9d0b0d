// RoPE for the two units of K that a thread has: partners, or neighbours with their pairs inside.
#pragma once

#include <cstdint>

#include "cuda/call.h"
#include "cuda/device/element.cuh"

namespace octavo::cuda {

// Rotary widths whose pairs come in whole units of channels; others are rotated a channel at a time.
OCTAVO_HOST_DEVICE inline bool rotates_units(const Call& call) {
  return call.rotary_half % (call.rotary_interleaved ? kUnit / 2 : kUnit) == 0;
}

OCTAVO_HOST_DEVICE inline bool angles_aligned(const Call& call) {
  return ((reinterpret_cast<std::uintptr_t>(call.cos) | reinterpret_cast<std::uintptr_t>(call.sin)) & 15u) == 0;
}

// The two units of a row that are a thread's: where pairs of channels lie rotary_half apart, the two have each other's
// partners. `second` is -1 for the last unit of an odd number.
struct UnitPair {
  std::int32_t first, second;

  __device__ UnitPair(const Call& call, int index) {
    const int units = call.head_size / kUnit;
    const bool partners = call.cos != nullptr && !call.rotary_interleaved && rotates_units(call);
    const int half = partners ? call.rotary_half / kUnit : 0;
    const int offset = partners ? call.rotary_offset / kUnit : 0;
    if (index < half) {
      first = offset + index;
      second = first + half;
      return;
    }
    const int rest = units - 2 * half;
    const int other = index - half + (rest + 1) / 2;
    first = beside(index - half, offset, half);
    second = other < rest ? beside(other, offset, half) : -1;
  }

 private:
  // The index-th unit that is not among the rotated ones.
  __device__ static int beside(int index, int offset, int half) { return index < offset ? index : index + 2 * half; }
};

// The angles of one token for a thread's units. kRegular: whole units of channels, everything at 16-byte boundaries.
template <typename T, bool kRegular>
class Rotation {
 public:
  // Starts to read them. Nothing is read, and nothing rotated, for a negative position.
  __device__ void fetch(const Call& call, const UnitPair& units, std::int32_t position) {
    position_ = position;
    if (position < 0 || !whole_units(call)) return;
    const std::int64_t row = static_cast<std::int64_t>(position) * call.rotary_half;
    const T* cosines = static_cast<const T*>(call.cos) + row;
    const T* sines = static_cast<const T*>(call.sin) + row;
    const bool aligned = kRegular || angles_aligned(call);
    const int first = units.first * kUnit - call.rotary_offset;
    if (!call.rotary_interleaved) {
      if (first < 0 || first >= call.rotary_half) return;
      cosine_.load(cosines + first, aligned);
      sine_.load(sines + first, aligned);
      return;
    }
    const int second = units.second * kUnit - call.rotary_offset;
    if (covers(call, first)) {
      cosine_.load_half(0, cosines + first / 2, aligned);
      sine_.load_half(0, sines + first / 2, aligned);
    }
    if (covers(call, second)) {
      cosine_.load_half(1, cosines + second / 2, aligned);
      sine_.load_half(1, sines + second / 2, aligned);
    }
  }

  // Rotates a head's channels `a` of the first unit and `b` of the second, normalised by `factor` and k_norm_weight.
  // `row` is the head's row as it was given.
  __device__ void apply(const Call& call, const UnitPair& units, const T* row, float factor, float (&a)[kUnit],
                        float (&b)[kUnit]) const {
    if (position_ < 0) return;
    if (!whole_units(call)) {
      rotate_channels(call, row, units.first * kUnit, factor, a);
      if (units.second >= 0) rotate_channels(call, row, units.second * kUnit, factor, b);
      return;
    }
    const int first = units.first * kUnit - call.rotary_offset;
    if (!call.rotary_interleaved && (first < 0 || first >= call.rotary_half)) return;
    float cosine[kUnit], sine[kUnit];
    cosine_.decode(cosine);
    sine_.decode(sine);
    if (!call.rotary_interleaved) {
#pragma unroll
      for (int c = 0; c < kUnit; ++c) {
        const float x = a[c];
        a[c] = x * cosine[c] - b[c] * sine[c];
        b[c] = b[c] * cosine[c] + x * sine[c];
      }
      return;
    }
    if (covers(call, first)) rotate_neighbours(cosine, sine, a);
    if (covers(call, units.second * kUnit - call.rotary_offset)) {
      rotate_neighbours(cosine + kUnit / 2, sine + kUnit / 2, b);
    }
  }

 private:
  __device__ static bool whole_units(const Call& call) {
    return kRegular || rotates_units(call);
  }

  __device__ static bool covers(const Call& call, int rotary_channel) {
    return rotary_channel >= 0 && rotary_channel < 2 * call.rotary_half;
  }

  __device__ static void rotate_neighbours(const float* cosine, const float* sine, float (&x)[kUnit]) {
#pragma unroll
    for (int i = 0; i < kUnit / 2; ++i) {
      const float a = x[2 * i];
      const float b = x[2 * i + 1];
      x[2 * i] = a * cosine[i] - b * sine[i];
      x[2 * i + 1] = b * cosine[i] + a * sine[i];
    }
  }

  // For any width. Partners are read once more.
  __device__ void rotate_channels(const Call& call, const T* row, int channel, float factor, float (&x)[kUnit]) const {
    const int half = call.rotary_half;
    const T* cosines = static_cast<const T*>(call.cos) + static_cast<std::int64_t>(position_) * half;
    const T* sines = static_cast<const T*>(call.sin) + static_cast<std::int64_t>(position_) * half;
#pragma unroll
    for (int c = 0; c < kUnit; ++c) {
      const int rotary = channel + c - call.rotary_offset;
      if (!covers(call, rotary)) continue;
      const bool second = call.rotary_interleaved ? rotary % 2 != 0 : rotary >= half;
      const int angle = call.rotary_interleaved ? rotary / 2 : second ? rotary - half : rotary;
      const int distance = call.rotary_interleaved ? 1 : half;
      const int partner = channel + c + (second ? -distance : distance);
      float other = to_float(row[partner]);
      if (call.k_norm != nullptr) other *= factor * to_float(static_cast<const T*>(call.k_norm)[partner]);
      const float cosine = to_float(cosines[angle]);
      const float sine = to_float(sines[angle]);
      x[c] = second ? x[c] * cosine + other * sine : x[c] * cosine - other * sine;
    }
  }

  std::int32_t position_ = -1;
  UnitOf<T> cosine_, sine_;
};

}  // namespace octavo::cuda
