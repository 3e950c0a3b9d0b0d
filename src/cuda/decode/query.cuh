// The query rows of a unit: which they are, and their fragments in shared memory.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/decode/formats.cuh"
#include "cuda/decode/shape.h"
#include "cuda/decode/units.cuh"
#include "cuda/device/element.cuh"

namespace octavo::cuda::decode {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// K: the kernel's shape. S: that of the unit's form (shape.h), the kernel's own or OneTile; it says which rows there
// are and how they are numbered.
template <typename K, typename S>
struct QueryRows {
  static constexpr CacheType kType = S::kType;
  static constexpr int kHead = S::kHead;
  using C = Compute<kType>;

  const Call& call;
  const Work& work;
  const Layout layout;
  std::byte* const shared;
  SequenceSpan record{};
  std::int32_t first_head = 0, heads = 0;  // KV heads
  std::int32_t first_row = 0, rows = 0;    // query rows of each of them: tokens x heads of the group

  __device__ QueryRows(const Call& call_, const Work& work_, std::byte* shared_)
      : call(call_), work(work_), layout(layout_of<K>(call_.batch_size)), shared(shared_) {}

  template <typename T>
  __device__ T* at(int offset) const {
    return reinterpret_cast<T*>(shared + offset);
  }

  __device__ const CallFacts& facts() const { return *at<const CallFacts>(layout.facts); }

  // token_of() and query_head_of() take a row of one KV head, is_row() one of all heads of the unit, head by head.
  __device__ std::int32_t token_of(int r) const { return work.by_group.of(first_row + r); }
  __device__ std::int32_t query_head_of(std::int32_t head, int r) const {
    return head * call.group + first_row + r - token_of(r) * call.group;
  }
  __device__ bool is_row(unsigned r) const {
    return r % S::kRows < static_cast<unsigned>(rows) && r / S::kRows < static_cast<unsigned>(heads);
  }
  __device__ KeyRange range_of(std::int32_t token) const {
    return keys_seen(call, work, record.past + token, record.kv_length());
  }

  // Queries and outputs are 16-bit; a 16-bit cache has their type, beside codes the call says it.
  __device__ bool has_bfloat() const {
    if constexpr (S::kWide) return std::is_same_v<C, __nv_bfloat16>;
    return call.element_type == ElementType::kBFloat16;
  }
  __device__ float element(const void* from, std::int64_t index) const {
    const std::uint16_t bits = static_cast<const std::uint16_t*>(from)[index];
    return has_bfloat() ? __uint_as_float(std::uint32_t{bits} << 16) : to_float(reinterpret_cast<const __half&>(bits));
  }

  // Rows of Q to fragments in shared memory: normalised, rotated, times K's channel scales, in the products' type. For
  // float16 products a row is multiplied by a power of two that puts its largest element just below 2^15, so that
  // nothing over- or underflows; the row's scale takes it back. (Not one that is Q as given, over a float16 cache.) For
  // codes with a bias also what scores start from (formats.cuh). All working warps; a thread has eight channels of a
  // row.
  __device__ void prepare_query(float key_scale) {
    constexpr unsigned kLanes = kHead / kUnit;  // neighbours that have one row
    for (unsigned i = threadIdx.x; i < S::kAllRows * kLanes; i += S::kWorkers) {
      const unsigned r = i / kLanes;
      const unsigned row = r % S::kRows;
      const std::int32_t head = first_head + static_cast<std::int32_t>(r / S::kRows);
      const std::int32_t token = token_of(row);
      const unsigned channel = i % kLanes * kUnit;
      const bool inside = is_row(r) && channel < static_cast<unsigned>(call.head_size);
      float x[kUnit] = {};
      if (inside) {
        const std::byte* from = call.query.row(record.start + token, query_head_of(head, row));
        load_query_unit(reinterpret_cast<const __half*>(from) + channel, x);
      }
      if (call.q_norm != nullptr || call.cos != nullptr || call.k_cache.per_channel) [[unlikely]] {
        if (call.q_norm != nullptr) normalise(inside, channel, x);
        if (call.cos != nullptr) {
          rotate(inside, record.past + token, channel, at<float>(layout.exchange) + r * S::kExchangeStride + channel,
                 x);
        }
        if (call.k_cache.per_channel && inside) {
          const float* scales = call.k_cache.scale + std::int64_t{head} * call.head_size + channel;
#pragma unroll
          for (int c = 0; c < kUnit; ++c) x[c] *= scales[c];
        }
      }
      store_query_unit(r, channel, key_scale, x);
    }
  }

  // `from`: of either type.
  __device__ void load_query_unit(const __half* from, float (&x)[kUnit]) const {
    UnitOf<__half> unit;
    unit.load(from, call.query.aligned);
    if (has_bfloat()) {
#pragma unroll
      for (int c = 0; c < kUnit; ++c) {
        const std::uint32_t word = reinterpret_cast<const std::uint32_t*>(unit.words)[c / 2];
        x[c] = __uint_as_float(c % 2 == 0 ? word << 16 : word & 0xffff0000u);
      }
    } else {
      unit.decode(x);
    }
  }

  // Of a row whose channels `kHead / kUnit` neighbouring lanes have.
  static __device__ float row_sum(float x) {
#pragma unroll
    for (int step = kHead / kUnit / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
  }

  __device__ void normalise(bool inside, unsigned channel, float (&x)[kUnit]) const {
    float squares = 0.0f;
#pragma unroll
    for (int c = 0; c < kUnit; ++c) squares = __fmaf_rn(x[c], x[c], squares);
    const float mean = row_sum(squares) / static_cast<float>(call.head_size);
    const float factor = 1.0f / sqrtf(mean + call.norm_epsilon);
    if (!inside) return;
#pragma unroll
    for (int c = 0; c < kUnit; ++c) x[c] = x[c] * factor * element(call.q_norm, channel + c);
  }

  // `mine`: a place for this thread's channels in a row of floats.
  __device__ void rotate(bool inside, std::int32_t position, unsigned channel, float* mine, float (&x)[kUnit]) const {
#pragma unroll
    for (int c = 0; c < kUnit; ++c) mine[c] = x[c];
    __syncwarp();
    const int half = call.rotary_half;
    const std::int64_t first_pair = std::int64_t{position} * half;
#pragma unroll 2
    for (int c = 0; c < kUnit; ++c) {
      const int d = static_cast<int>(channel) + c - call.rotary_offset;
      if (!inside || d < 0 || d >= 2 * half) continue;
      const bool second = call.rotary_interleaved ? d % 2 != 0 : d >= half;
      const int pair = call.rotary_interleaved ? d / 2 : second ? d - half : d;
      const int distance = call.rotary_interleaved ? 1 : half;
      const float cosine = element(call.cos, first_pair + pair);
      const float sine = element(call.sin, first_pair + pair);
      const float own = mine[c];
      const float other = mine[second ? c - distance : c + distance];
      x[c] = __fmaf_rn(own, cosine, __fmul_rn(second ? other : -other, sine));
    }
    __syncwarp();  // the places are free again
  }

  // Row r of all heads, channels first .. first + 7.
  __device__ void store_query_unit(unsigned r, unsigned first, float key_scale, float (&x)[kUnit]) {
    // A base-2 logit is scale * product; the row has the scale's sign, so that the largest product is the largest
    // logit.
    const float logit_scale = call.scale * key_scale;
    float power = 1.0f, inverse_power = 1.0f;
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
        if (exponent < 255) {
          const int of_power = min(268 - exponent, 253);
          power = __uint_as_float(static_cast<std::uint32_t>(of_power) << 23);
          inverse_power = __uint_as_float(static_cast<std::uint32_t>(254 - of_power) << 23);
        }
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
    float scale = fabsf(logit_scale) * inverse_power * (kLog2E / kCodeUnit<kType>);
    if (isinf(scale) && !isinf(logit_scale)) scale = FLT_MAX;  // logits of 10^35 and more
    at<float>(layout.row_scale)[r] = scale;
  }

  static __device__ unsigned place_in_fragments(unsigned row, unsigned d) {
    const Place p = place_of<kType, kHead>(d);
    return ((((row / 8) * S::kSteps + p.step) * 32 + row % 8 * 4 + p.lane) * 2 + p.reg) * 2 + p.half;
  }
};

}  // namespace octavo::cuda::decode
