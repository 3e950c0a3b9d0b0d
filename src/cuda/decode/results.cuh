// From the sums of a block's warps to the output: warps folded segment by segment, segments by the tree, runs by
// the block that finishes last.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/decode/query.cuh"
#include "cuda/decode/shape.h"
#include "cuda/decode/tree.cuh"
#include "cuda/decode/units.cuh"
#include "cuda/device/barrier.cuh"
#include "cuda/device/softmax.cuh"

namespace octavo::cuda::decode {

// Adds one. What the block wrote before a barrier ahead of this is visible to whoever reads the count, and the other
// way round.
__device__ inline std::uint32_t count_arrival(std::uint32_t* count) {
  std::uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
  return before;
}

// Four channels of a row's partial results, run by run.
struct Runs {
  const float* sums;
  const float2* states;
  std::int64_t sums_step, states_step;
  std::int32_t count;
};
inline constexpr int kFewRuns = 4;
inline constexpr int kRunsAtOnce = 16;
inline constexpr int kRunsOfGroup = 8;  // of a first merge where there are more than that

// kCount of them from `first` on, folded.
template <int kCount>
__device__ inline Node merge_some(const Runs& runs, std::int32_t first) {
  Node leaves[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (first + i >= runs.count) continue;
    leaves[i].sum = __ldcg(reinterpret_cast<const float4*>(runs.sums + (first + i) * runs.sums_step));
    const float2 state = __ldcg(runs.states + (first + i) * runs.states_step);
    leaves[i].maximum = state.x;
    leaves[i].weight = state.y;
  }
#pragma unroll
  for (int step = 1; step < kCount; step *= 2) {
#pragma unroll
    for (int i = 0; i + step < kCount; i += 2 * step) {
      if (first + i + step < runs.count) leaves[i] = fold(leaves[i], leaves[i + step]);
    }
  }
  return leaves[0];
}

// All of them. Not inlined, so that a few runs need no memory for the stack and little code.
static __device__ __noinline__ Node merge_many(Runs runs) {
  if (runs.count <= kRunsAtOnce) return merge_some<kRunsAtOnce>(runs, 0);
  constexpr int kLevels = 12;
  Node stack[kLevels];
  Node node;
  for (std::int32_t first = 0; first < runs.count; first += kRunsAtOnce) {
    node = push(
        merge_some<kRunsAtOnce>(runs, first), static_cast<std::uint32_t>(first / kRunsAtOnce),
        first + kRunsAtOnce >= runs.count, kLevels, [&](int level) { return stack[level]; },
        [&](int level, const Node& x) { stack[level] = x; });
  }
  return node;
}

__device__ inline Node merge_runs(const Runs& runs) {
  if (runs.count <= kFewRuns) [[likely]]
    return merge_some<kFewRuns>(runs, 0);
  return merge_many(runs);
}

template <typename K, typename S>
struct Results : QueryRows<K, S> {
  using Rows = QueryRows<K, S>;
  static constexpr int kHead = S::kHead;
  static constexpr int kItems = S::kItems;
  using Rows::call;
  using Rows::element;
  using Rows::facts;
  using Rows::first_head;
  using Rows::has_bfloat;
  using Rows::is_row;
  using Rows::layout;
  using Rows::query_head_of;
  using Rows::record;
  using Rows::token_of;
  using Rows::work;

  Unit unit{};

  using Rows::Rows;

  // What a thread folds: four channels of a row of those of all heads, head by head.
  struct Item {
    unsigned row = 0;
    unsigned channel = 0;  // the first
  };
  __device__ Item item(int i) const {
    const unsigned within = static_cast<unsigned>(i) * S::kWorkers + threadIdx.x;
    return {within / (kHead / 4), within % (kHead / 4) * 4};
  }
  __device__ bool has_item(const Item& of) const { return of.row < S::kAllRows && is_row(of.row); }

  __device__ float* exchanged(int group, int row) const {
    return this->template at<float>(layout.exchange) + (group * S::kAllRows + row) * S::kExchangeStride;
  }
  __device__ float2& exchanged_state(int group, int row) const {
    return this->template at<float2>(layout.exchange_state)[group * S::kAllRows + row];
  }

  // Folds what the warps of a head handed over, in their order.
  __device__ Node gather(const Item& of) const {
    Node node;
    if constexpr (S::kSharesWeights) {  // one maximum, and a row's sums stand there once
      node.maximum = exchanged_state(0, of.row).x;
#pragma unroll
      for (int g = 0; g < S::kGroups; ++g) node.weight += exchanged_state(g, of.row).y;
      node.sum = *reinterpret_cast<const float4*>(exchanged(0, of.row) + of.channel);
    } else {
#pragma unroll
      for (int g = 0; g < S::kGroups; ++g) node.maximum = fmaxf(node.maximum, exchanged_state(g, of.row).x);
      const float reference = node.maximum == -INFINITY ? 0.0f : node.maximum;
#pragma unroll
      for (int g = 0; g < S::kGroups; ++g) {
        const float2 state = exchanged_state(g, of.row);
        const float factor = exp2_approximate(state.x - reference);
        const float4 x = *reinterpret_cast<const float4*>(exchanged(g, of.row) + of.channel);
        node.weight = fmaf(state.y, factor, node.weight);
        node.sum.x = fmaf(x.x, factor, node.sum.x);
        node.sum.y = fmaf(x.y, factor, node.sum.y);
        node.sum.z = fmaf(x.z, factor, node.sum.z);
        node.sum.w = fmaf(x.w, factor, node.sum.w);
      }
    }
    return node;
  }

  // The segment's node of an item joins the tree.
  __device__ void fold_item(const Item& of, std::int32_t index, bool last) const {
    constexpr int kNodes = K::kAllRows * kHead / 4;  // of a level
    const unsigned place = of.row * (kHead / 4) + of.channel / 4;
    const std::int64_t first = std::int64_t{blockIdx.x} * work.levels;
    const auto sums_at = [&](int level) -> float4& {
      if (level < K::kLevels) return this->template at<float4>(layout.stack_sums)[level * kNodes + place];
      return work.stack_sums[(first + level) * kNodes + place];
    };
    const auto state_at = [&](int level) -> float2& {
      if (level < K::kLevels) return this->template at<float2>(layout.stack_states)[level * kNodes + place];
      return work.stack_states[(first + level) * kNodes + place];
    };
    const auto load = [&](int level) {
      Node node;
      node.sum = sums_at(level);
      const float2 state = state_at(level);
      node.maximum = state.x;
      node.weight = state.y;
      return node;
    };
    const auto store = [&](int level, const Node& node) {
      sums_at(level) = node.sum;
      state_at(level) = make_float2(node.maximum, node.weight);
    };
    const Node node = push(gather(of), static_cast<std::uint32_t>(index), last, work.levels, load, store);
    if (last) finish_item(of, node);
  }

  // A node over the whole unit: to the output where that is the whole sequence, else to the workspace.
  __device__ void finish_item(const Item& of, const Node& node) const {
    if (unit.partial < 0) {
      write(of, node);
      return;
    }
    store_partial(of, unit.run, node);
  }

  __device__ void store_partial(const Item& of, std::int32_t run, const Node& node) const {
    const std::int64_t place = partial_place(run, of);
    *reinterpret_cast<float4*>(work.sums + place * kHead + of.channel) = node.sum;
    if (of.channel == 0) work.states[place] = make_float2(node.maximum, node.weight);
  }

  __device__ void write(const Item& of, const Node& node) const {
    const auto width = static_cast<unsigned>(call.head_size);
    if (of.channel >= width) return;
    const auto row = static_cast<std::int32_t>(of.row % S::kRows);
    const std::int32_t kv_head = first_head + static_cast<std::int32_t>(of.row / S::kRows);
    const std::int32_t head = query_head_of(kv_head, row);
    const std::int32_t token = record.start + token_of(row);
    const float maximum = __fmul_rn(node.maximum, kLn2);
    float factor = node.weight == 0.0f ? 0.0f : 1.0f / node.weight;
    if (call.sink != nullptr) [[unlikely]] {
      const float sink = element(call.sink, head);
      factor = end_row(maximum, node.weight, &sink).factor;
    }
    factor *= facts().value_scale;
    float x[4] = {node.sum.x * factor, node.sum.y * factor, node.sum.z * factor, node.sum.w * factor};
    if (call.v_cache.per_channel) [[unlikely]] {
      const float* scales = call.v_cache.scale + std::int64_t{kv_head} * width + of.channel;
      const float sums[4] = {node.sum.x, node.sum.y, node.sum.z, node.sum.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = sums[i] * (factor * scales[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = node.weight != 0.0f ? x[i] : 0.0f;
    const std::int32_t of_call = token * call.num_heads + head;  // below 2^31 (backend.cc)
    auto* output = static_cast<std::uint16_t*>(call.output) + std::int64_t{of_call} * width + of.channel;
    const uint2 words = has_bfloat() ? make_uint2(pack<__nv_bfloat16>(x[0], x[1]), pack<__nv_bfloat16>(x[2], x[3]))
                                     : make_uint2(pack<__half>(x[0], x[1]), pack<__half>(x[2], x[3]));
    if (reinterpret_cast<std::uintptr_t>(output) % sizeof(words) == 0) [[likely]] {
      *reinterpret_cast<uint2*>(output) = words;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        output[i] = static_cast<std::uint16_t>((i < 2 ? words.x : words.y) >> i % 2 * 16);
      }
    }
    if (call.lse != nullptr && of.channel == 0) [[unlikely]] {
      constexpr const float* kNoSink = nullptr;
      call.lse[std::int64_t{head} * call.token_count + token] = end_row(maximum, node.weight, kNoSink).lse;
    }
  }

  // ---- runs ----

  // The partial result of a run, of this unit's row tile and heads.
  __device__ std::int64_t partial_of(std::int32_t run) const {
    return unit.partial + std::int64_t{run - unit.run} * unit.stride;
  }
  __device__ std::int64_t partial_place(std::int32_t run, const Item& of) const {
    return partial_of(run) * K::kAllRows + of.row;
  }

  // Runs `first`, first + step, ... below `end`, folded.
  __device__ Node merge(const Item& of, std::int32_t first, std::int32_t end, std::int32_t step) const {
    const std::int64_t place = partial_place(first, of);
    const std::int64_t rows = std::int64_t{step} * unit.stride * K::kAllRows;
    return merge_runs({work.sums + place * kHead + of.channel, work.states + place, rows * kHead, rows,
                       (end - first + step - 1) / step});
  }

  // Whether this block is the last of `count` to come here; what they wrote is then visible. All working threads.
  __device__ bool is_last(std::uint32_t* counter, std::int32_t count) const {
    auto& flag = *this->template at<std::uint32_t>(layout.flag);
    sync_workers();  // what this block wrote is written, and the flag is free
    if (threadIdx.x == 0) {
      flag = count_arrival(counter);
      if (flag + 1 == static_cast<std::uint32_t>(count)) *counter = 0;  // for a launch without a schedule kernel ahead
    }
    sync_workers();
    return flag + 1 == static_cast<std::uint32_t>(count);
  }

  // The block that is last to finish a run of a sequence merges all of them: of many runs, every eight by the last of
  // them, and what those make by the last again. All working threads; ends with a barrier.
  __device__ void merge_if_last() const {
    if (unit.partial >= 0) {
      if (unit.runs <= kRunsAtOnce) [[likely]] {
        if (is_last(work.arrived + partial_of(0), unit.runs)) write_merged(1);
      } else {
        const std::int32_t first = unit.run / kRunsOfGroup * kRunsOfGroup;
        const std::int32_t end = min(first + kRunsOfGroup, unit.runs);
        if (is_last(work.arrived + partial_of(first), end - first)) {
          merge_group(first, end);
          const std::int32_t groups = (unit.runs + kRunsOfGroup - 1) / kRunsOfGroup;
          if (is_last(work.arrived + partial_of(1), groups)) write_merged(kRunsOfGroup);  // the first group's second
        }
      }
    }
    sync_workers();  // the flag is free again, and the exchange may hold rows of Q
  }

  // Folds some runs into the first of them.
  __device__ void merge_group(std::int32_t first, std::int32_t end) const {
#pragma unroll 1
    for (int i = 0; i < kItems; ++i) {
      const Item of = item(i);
      Node node;
      if (has_item(of)) node = merge(of, first, end, 1);
      sync_workers();  // all have read the first
      if (has_item(of)) store_partial(of, first, node);
    }
  }

  __device__ void write_merged(std::int32_t step) const {
#pragma unroll 1
    for (int i = 0; i < kItems; ++i) {
      const Item of = item(i);
      if (has_item(of)) write(of, merge(of, 0, unit.runs, step));
    }
  }

  // Of all threads but those of the copying warps.
  static __device__ void sync_workers() {
    sync_threads<S::kWorkers>(1);
  }
};

}  // namespace octavo::cuda::decode
