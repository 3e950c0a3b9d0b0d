#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cuda/device/codec.cuh"
#include "cuda/device/head_row.cuh"
#include "cuda/device/sequences.cuh"
#include "cuda/launch.cuh"
#include "cuda/prologue/kernel.h"

namespace octavo::cuda {
namespace {

constexpr int kWarps = 8;

// Outputs of one token without a valid sequence, for the query heads of one KV head.
template <typename T>
__device__ void clear_outputs(const Call& call, std::int64_t token, int kv_head) {
  const int lane = threadIdx.x % 32;
  const std::int64_t first_head = static_cast<std::int64_t>(kv_head) * call.group;
  T* output = static_cast<T*>(call.output) + (token * call.num_heads + first_head) * call.v_head_size;
  for (int i = lane; i < call.group * call.v_head_size; i += 32) output[i] = from_float<T>(0.0f);
  if (call.lse == nullptr) return;
  for (int i = lane; i < call.group; i += 32) call.lse[(first_head + i) * call.token_count + token] = -INFINITY;
}

// Eight elements of T as they came.
template <typename T>
struct UnitOf {
  static constexpr int kWords = kUnit * sizeof(T) / sizeof(uint4);
  uint4 words[kWords];

  __device__ void load(const T* from, bool aligned) {
    if (aligned) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const uint4*>(from)[i];
      return;
    }
    T elements[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) elements[i] = from[i];
    memcpy(words, elements, sizeof(words));
  }

  __device__ void decode(float (&x)[kUnit]) const {
    T elements[kUnit];
    memcpy(elements, words, sizeof(words));
#pragma unroll
    for (int i = 0; i < kUnit; ++i) x[i] = to_float(elements[i]);
  }
};

// A unit to its place in a cache row: as it is where the cache holds T, else by way of floats.
template <typename T>
__device__ void write_unit(const Cache& cache, int head, int head_size, int channel, const UnitOf<T>& unit,
                           std::byte* row) {
  if (holds<T>(cache.type) && cache.aligned) {
    auto* to = reinterpret_cast<uint4*>(row + channel * sizeof(T));
#pragma unroll
    for (int i = 0; i < UnitOf<T>::kWords; ++i) to[i] = unit.words[i];
    return;
  }
  float x[kUnit];
  unit.decode(x);
  encode_unit(cache, head, head_size, channel, x, row);
}

struct Slot {
  std::int64_t block, offset;  // block -1: the token's K and V are not stored
};

__device__ Slot find_slot(const Call& call, int sequence, const SequenceRecord& record, int token) {
  if (call.slot_mapping.data != nullptr) {
    const std::int64_t flat = call.slot_mapping[token];
    if (flat < 0 || flat >= call.num_blocks * call.block_size) return {-1, 0};
    return {flat / call.block_size, flat % call.block_size};
  }
  PageEntry page;
  page.fetch(call, sequence, record.past + token - record.start, true);
  return {page.block(call), page.slot};
}

// Shared memory of a warp: K rows of this many channels in all wait there to be normalised or rotated.
constexpr int kStagedChannels = 1024;

// One lane's place in the units of a token: for each head first K's, then V's (K's only in LATENT).
struct UnitCursor {
  int head, unit;

  __device__ void skip(int steps, int units_a_head) {
    unit += steps;
    while (unit >= units_a_head) {
      unit -= units_a_head;
      ++head;
    }
  }
};

// A warp takes `heads` KV heads of one token at a time. Their rows are read before it is known where they go, so that
// the searches and the reads wait together.
template <typename T>
__global__ void __launch_bounds__(kWarps * 32, 4) prologue(const __grid_constant__ Call call, int heads) {
  extern __shared__ __align__(16) float rows[];
  constexpr int kAtOnce = 4;  // units of a lane whose reads are under way together
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  float* staged = rows + warp * kStagedChannels;
  const int groups = (call.kv_num_heads + heads - 1) / heads;
  const std::int64_t items = static_cast<std::int64_t>(call.token_count) * groups;
  const bool prepared = call.k_norm != nullptr || call.cos != nullptr;
  const int units = call.head_size / kUnit;
  const int units_a_head = call.latent ? units : 2 * units;

  for (std::int64_t item = std::int64_t{blockIdx.x} * kWarps + warp; item < items;
       item += std::int64_t{gridDim.x} * kWarps) {
    const auto token = static_cast<int>(item / groups);
    const int first_head = static_cast<int>(item % groups) * heads;
    const int last_head = min(first_head + heads, call.kv_num_heads);
    UnitCursor cursor{first_head, 0};
    cursor.skip(lane, units_a_head);
    Slot slot{-2, 0};
    SequenceRecord record{};
    while (true) {
      // The next units of K and V, of any head.
      UnitOf<T> read[kAtOnce];
      UnitCursor ahead = cursor;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (ahead.head < last_head) {
          const bool is_value = ahead.unit >= units;
          const TokenRows& from = is_value ? call.value : call.key;
          const int channel = (is_value ? ahead.unit - units : ahead.unit) * kUnit;
          read[i].load(reinterpret_cast<const T*>(from.row(token, ahead.head)) + channel, from.aligned);
        }
        ahead.skip(32, units_a_head);
      }
      // Where they go.
      if (slot.block == -2) {
        const int found = warp_last_not_above(call.scratch.records, call.batch_size, &SequenceRecord::start, token);
        const int sequence = owner_if(call, found, token);
        if (sequence < 0) {
          for (int head = first_head; head < last_head; ++head) clear_outputs<T>(call, token, head);
          break;
        }
        record = call.scratch.records[sequence];
        slot = find_slot(call, sequence, record, token);
        if (slot.block < 0) break;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (cursor.head < last_head) {
          const bool is_value = cursor.unit >= units;
          const int channel = (is_value ? cursor.unit - units : cursor.unit) * kUnit;
          if (prepared && !is_value) {
            float x[kUnit];
            read[i].decode(x);
            store_unit(staged + (cursor.head - first_head) * call.head_size + channel, x);
          } else {
            const Cache& cache = is_value ? call.v_cache : call.k_cache;
            write_unit(cache, cursor.head, call.head_size, channel, read[i],
                       cache.data + cache.offset(slot.block, slot.offset, cursor.head));
          }
        }
        cursor.skip(32, units_a_head);
      }
      if (!__any_sync(0xffffffffu, cursor.head < last_head)) break;
    }
    if (slot.block < 0 || !prepared) continue;

    // K, normalised and rotated.
    const std::int32_t position = position_of(call, record, token - record.start);
    prepare_rows<T>(call, call.k_norm, position, last_head - first_head, staged);
    UnitCursor k{first_head, 0};
    for (k.skip(lane, units); k.head < last_head; k.skip(32, units)) {
      float x[kUnit];
      load_unit(staged + (k.head - first_head) * call.head_size + k.unit * kUnit, true, x);
      encode_unit(call.k_cache, k.head, call.head_size, k.unit * kUnit, x,
                  call.k_cache.data + call.k_cache.offset(slot.block, slot.offset, k.head));
    }
    __syncwarp();  // the next item reuses the rows
  }
}

// One head a warp while there are too few tokens to fill the device: a decode step then takes one head's time.
constexpr std::int64_t kManyWarps = 8192;

template <typename T>
cudaError_t launch_for(const Call& call, cudaStream_t stream) {
  const std::int64_t rows = static_cast<std::int64_t>(call.token_count) * call.kv_num_heads;
  const std::int64_t most = std::min<std::int64_t>(kStagedChannels / call.head_size, call.kv_num_heads);
  const auto heads = static_cast<int>(std::clamp<std::int64_t>(rows / kManyWarps, 1, most));
  const std::int64_t items = static_cast<std::int64_t>(call.token_count) * ((call.kv_num_heads + heads - 1) / heads);
  const std::int64_t blocks = std::min<std::int64_t>((items + kWarps - 1) / kWarps, 1 << 30);
  const bool prepared = call.k_norm != nullptr || call.cos != nullptr;
  const std::size_t shared = prepared ? sizeof(float) * kWarps * kStagedChannels : 0;
  return launch(prologue<T>, dim3(static_cast<unsigned>(blocks)), kWarps * 32, shared, stream, call, heads);
}

}  // namespace

cudaError_t launch_prologue(const Call& call, cudaStream_t stream) {
  switch (call.element_type) {
    case ElementType::kFloat16: return launch_for<__half>(call, stream);
    case ElementType::kBFloat16: return launch_for<__nv_bfloat16>(call, stream);
    default: return launch_for<float>(call, stream);
  }
}

}  // namespace octavo::cuda
