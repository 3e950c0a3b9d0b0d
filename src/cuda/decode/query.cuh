// The query rows of a unit: which they are, and their fragments in shared memory.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/decode/formats.cuh"
#include "cuda/decode/shape.h"
#include "cuda/device/element.cuh"
#include "cuda/device/sequences.cuh"

namespace octavo::cuda::decode {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

template <CacheType kType, int kHead, int kTiles>
struct QueryRows {
  using S = Shape<kType, kHead, kTiles>;
  using C = Compute<kType>;

  const Call& call;
  const Layout layout;
  std::byte* const shared;
  SequenceSpan record{};
  std::int32_t first_head = 0, heads = 0;  // KV heads
  std::int32_t first_row = 0, rows = 0;    // query rows of each of them: tokens x heads of the group

  __device__ QueryRows(const Call& call_, std::byte* shared_)
      : call(call_), layout(layout_of<S>(call_.batch_size)), shared(shared_) {}

  template <typename T>
  __device__ T* at(int offset) const {
    return reinterpret_cast<T*>(shared + offset);
  }

  // token_of() and query_head_of() take a row of one KV head, is_row() one of all heads of the unit, head by head.
  __device__ std::int32_t token_of(int r) const { return (first_row + r) / call.group; }
  __device__ std::int32_t query_head_of(std::int32_t head, int r) const {
    return head * call.group + (first_row + r) % call.group;
  }
  __device__ bool is_row(int r) const { return r % S::kRows < rows && r / S::kRows < heads; }
  __device__ KeyRange range_of(std::int32_t token) const {
    return visible(call, record.past + token, record.kv_length());
  }

  // body(T()) for the type of the call's queries and outputs. A 16-bit cache has the same.
  template <typename Body>
  __device__ void with_element_type(const Body& body) const {
    if constexpr (S::kWide) {
      body(C());
    } else if (call.element_type == ElementType::kFloat16) {
      body(__half());
    } else {
      body(__nv_bfloat16());
    }
  }

  // Rows of Q to fragments in shared memory: normalised, rotated, times K's channel scales, in the products' type. For
  // float16 products a row is multiplied by a power of two that puts its largest element just below 2^15, so that
  // nothing over- or underflows; the row's scale takes it back. (Not one that is Q as given, over a float16 cache.) For
  // codes with a bias also what scores start from (formats.cuh). All working warps; a thread has eight channels of a
  // row.
  template <typename T>
  __device__ void prepare_query() {
    constexpr int kLanes = kHead / kUnit;  // neighbours that have one row
    const int width = call.head_size;
    for (int i = static_cast<int>(threadIdx.x); i < S::kAllRows * kLanes; i += S::kWorkers) {
      const int r = i / kLanes;
      const int row = r % S::kRows;
      const std::int32_t head = first_head + r / S::kRows;
      const std::int32_t token = token_of(row);
      const int channel = i % kLanes * kUnit;
      const bool inside = is_row(r) && channel < width;
      float x[kUnit] = {};
      if (inside) {
        const T* from = reinterpret_cast<const T*>(call.query.row(record.start + token, query_head_of(head, row)));
        load_unit(from + channel, call.query.aligned, x);
      }
      if (call.q_norm != nullptr) normalise<T>(inside, channel, x);
      if (call.cos != nullptr) {
        rotate<T>(inside, record.past + token, channel, at<float>(layout.exchange) + r * S::kExchangeStride + channel,
                  x);
      }
      if (call.k_cache.per_channel && inside) {
        const float* scales = call.k_cache.scale + std::int64_t{head} * width + channel;
#pragma unroll
        for (int c = 0; c < kUnit; ++c) x[c] *= scales[c];
      }
      store_query_unit(r, channel, x);
    }
  }

  // Of a row whose channels `kHead / kUnit` neighbouring lanes have.
  static __device__ float row_sum(float x) {
#pragma unroll
    for (int step = kHead / kUnit / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
  }

  template <typename T>
  __device__ void normalise(bool inside, int channel, float (&x)[kUnit]) const {
    float squares = 0.0f;
#pragma unroll
    for (int c = 0; c < kUnit; ++c) squares = __fmaf_rn(x[c], x[c], squares);
    const float mean = row_sum(squares) / static_cast<float>(call.head_size);
    const float factor = 1.0f / sqrtf(mean + call.norm_epsilon);
    if (!inside) return;
#pragma unroll
    for (int c = 0; c < kUnit; ++c) x[c] = x[c] * factor * to_float(static_cast<const T*>(call.q_norm)[channel + c]);
  }

  // `mine`: a place for this thread's channels in a row of floats.
  template <typename T>
  __device__ void rotate(bool inside, std::int32_t position, int channel, float* mine, float (&x)[kUnit]) const {
#pragma unroll
    for (int c = 0; c < kUnit; ++c) mine[c] = x[c];
    __syncwarp();
    const int half = call.rotary_half;
    const T* cosines = static_cast<const T*>(call.cos) + std::int64_t{position} * half;
    const T* sines = static_cast<const T*>(call.sin) + std::int64_t{position} * half;
#pragma unroll 2
    for (int c = 0; c < kUnit; ++c) {
      const int d = channel + c - call.rotary_offset;
      if (!inside || d < 0 || d >= 2 * half) continue;
      const bool second = call.rotary_interleaved ? d % 2 != 0 : d >= half;
      const int pair = call.rotary_interleaved ? d / 2 : second ? d - half : d;
      const int distance = call.rotary_interleaved ? 1 : half;
      const float cosine = to_float(cosines[pair]);
      const float sine = to_float(sines[pair]);
      const float own = mine[c];
      const float other = mine[second ? c - distance : c + distance];
      x[c] = __fmaf_rn(own, cosine, __fmul_rn(second ? other : -other, sine));
    }
    __syncwarp();  // the places are free again
  }

  // Row r of all heads, channels first .. first + 7.
  __device__ void store_query_unit(int r, int first, float (&x)[kUnit]) {
    // A base-2 logit is scale * product; the row has the scale's sign, so that the largest product is the largest
    // logit.
    const float logit_scale = call.scale * call.k_cache.tensor_scale();
    float power = 1.0f;
    if constexpr (std::is_same_v<C, __half>) {
      const bool as_given = S::kWide && call.q_norm == nullptr && call.cos == nullptr && !call.k_cache.per_channel;
      if (!as_given) {
        float largest = 0.0f;
#pragma unroll
        for (int c = 0; c < kUnit; ++c) largest = fmaxf(largest, fabsf(x[c]));
#pragma unroll
        for (int step = kHead / kUnit / 2; step > 0; step /= 2) {
          largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
        }
        // 2^14 over the largest's own power of two, as far as it is a normal number
        const int exponent = static_cast<int>(__float_as_uint(largest) >> 23);
        if (exponent < 255) power = __uint_as_float(static_cast<std::uint32_t>(min(268 - exponent, 253)) << 23);
      }
    }
    auto* to = at<std::uint16_t>(layout.query);
    float sum = 0.0f;  // of the row as the products see it
#pragma unroll
    for (int c = 0; c < kUnit; ++c) {
      constexpr bool kBiased = kCodeBias<kType> != 0;
      const float excess = excess_of<kType>(c);
      const C element = from_float<C>(x[c] * (logit_scale < 0.0f ? -power : power) / excess);
      to[place_in_fragments(r, first + c)] = reinterpret_cast<const std::uint16_t&>(element);
      if constexpr (kBiased) sum = __fmaf_rn(to_float(element), excess, sum);
    }
    if constexpr (kCodeBias<kType> != 0) {
      // With an infinity in the row it is NaN or infinite, and so are all its scores NaN.
      sum = row_sum(sum);
      if (first == 0) at<float>(layout.row_bias)[r] = -kCodeUnit<kType> * kCodeBias<kType> * sum;
    }
    if (first != 0) return;
    float scale = fabsf(logit_scale) / power * (kLog2E / kCodeUnit<kType>);
    if (isinf(scale) && !isinf(logit_scale)) scale = FLT_MAX;  // logits of 10^35 and more
    at<float>(layout.row_scale)[r] = scale;
  }

  static __device__ int place_in_fragments(int row, int d) {
    const Place p = place_of<kType, kHead>(d);
    return ((((row / 8) * S::kSteps + p.step) * 32 + row % 8 * 4 + p.lane) * 2 + p.reg) * 2 + p.half;
  }
};

}  // namespace octavo::cuda::decode
