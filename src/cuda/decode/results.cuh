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
inline constexpr int kRunsAtOnce = 16;

// kRunsAtOnce of them from `first` on, folded.
__device__ inline Node merge_some(const Runs& runs, std::int32_t first) {
  Node leaves[kRunsAtOnce];
#pragma unroll
  for (int i = 0; i < kRunsAtOnce; ++i) {
    if (first + i >= runs.count) continue;
    leaves[i].sum = __ldcg(reinterpret_cast<const float4*>(runs.sums + (first + i) * runs.sums_step));
    const float2 state = __ldcg(runs.states + (first + i) * runs.states_step);
    leaves[i].maximum = state.x;
    leaves[i].weight = state.y;
  }
#pragma unroll
  for (int step = 1; step < kRunsAtOnce; step *= 2) {
#pragma unroll
    for (int i = 0; i + step < kRunsAtOnce; i += 2 * step) {
      if (first + i + step < runs.count) leaves[i] = fold(leaves[i], leaves[i + step]);
    }
  }
  return leaves[0];
}

// All of them. Not inlined, so that a few runs need no memory for the stack.
static __device__ __noinline__ Node merge_many(Runs runs) {
  constexpr int kLevels = 12;
  Node stack[kLevels];
  Node node;
  for (std::int32_t first = 0; first < runs.count; first += kRunsAtOnce) {
    node = push(
        merge_some(runs, first), static_cast<std::uint32_t>(first / kRunsAtOnce), first + kRunsAtOnce >= runs.count,
        kLevels, [&](int level) { return stack[level]; }, [&](int level, const Node& x) { stack[level] = x; });
  }
  return node;
}

__device__ inline Node merge_runs(const Runs& runs) {
  return runs.count <= kRunsAtOnce ? merge_some(runs, 0) : merge_many(runs);
}

template <CacheType kType, int kHead, int kTiles>
struct Results : QueryRows<kType, kHead, kTiles> {
  using Rows = QueryRows<kType, kHead, kTiles>;
  using S = typename Rows::S;
  using Rows::call;
  using Rows::first_head;
  using Rows::is_row;
  using Rows::layout;
  using Rows::query_head_of;
  using Rows::record;
  using Rows::token_of;

  const Work& work;
  Unit unit{};

  __device__ Results(const Call& call_, const Work& work_, std::byte* shared_) : Rows(call_, shared_), work(work_) {}

  // What a thread folds: four channels of a row of those of all heads, head by head.
  struct Item {
    int row = 0;
    int channel = 0;  // the first
  };
  __device__ Item item(int i) const {
    const int within = i * S::kWorkers + static_cast<int>(threadIdx.x);
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
    return node;
  }

  // The segment's node of an item joins the tree.
  __device__ void fold_item(const Item& of, std::int32_t index, bool last) const {
    constexpr int kNodes = S::kAllRows * kHead / 4;  // of a level
    const int place = of.row * (kHead / 4) + of.channel / 4;
    const std::int64_t first = std::int64_t{blockIdx.x} * work.levels;
    const auto sums_at = [&](int level) -> float4& {
      if (level < S::kLevels) return this->template at<float4>(layout.stack_sums)[level * kNodes + place];
      return work.stack_sums[(first + level) * kNodes + place];
    };
    const auto state_at = [&](int level) -> float2& {
      if (level < S::kLevels) return this->template at<float2>(layout.stack_states)[level * kNodes + place];
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
    const std::int64_t place = partial_place(unit.run, of);
    *reinterpret_cast<float4*>(work.sums + place * kHead + of.channel) = node.sum;
    if (of.channel == 0) work.states[place] = make_float2(node.maximum, node.weight);
  }

  __device__ void write(const Item& of, const Node& node) const {
    this->with_element_type([&](auto zero) { write_output<decltype(zero)>(of, node); });
  }

  template <typename T>
  __device__ void write_output(const Item& of, const Node& node) const {
    const int width = call.head_size;
    if (of.channel >= width) return;
    const std::int32_t kv_head = first_head + of.row / S::kRows;
    const std::int32_t head = query_head_of(kv_head, of.row % S::kRows);
    const std::int64_t token = record.start + token_of(of.row % S::kRows);
    const T* sink = call.sink != nullptr ? static_cast<const T*>(call.sink) + head : nullptr;
    const RowEnd end = end_row(__fmul_rn(node.maximum, kLn2), node.weight, sink);
    const float factor = end.factor * call.v_cache.tensor_scale();
    const float x[4] = {node.sum.x, node.sum.y, node.sum.z, node.sum.w};
    T* output = static_cast<T*>(call.output) + (token * call.num_heads + head) * width + of.channel;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float scaled = x[i] * (factor * call.v_cache.channel_scale(kv_head, of.channel + i, width));
      output[i] = from_float<T>(node.weight != 0.0f ? scaled : 0.0f);
    }
    if (of.channel == 0 && call.lse != nullptr) call.lse[std::int64_t{head} * call.token_count + token] = end.lse;
  }

  // ---- runs ----

  __device__ std::int64_t partial_place(std::int32_t run, const Item& of) const {
    const std::int64_t partial = unit.partial + std::int64_t{run - unit.run} * unit.stride;
    return partial * S::kAllRows + of.row;
  }

  __device__ Node merge(const Item& of) const {
    const std::int64_t place = partial_place(0, of);
    const std::int64_t step = std::int64_t{unit.stride} * S::kAllRows;
    return merge_runs({work.sums + place * kHead + of.channel, work.states + place, step * kHead, step, unit.runs});
  }

  // The block that is last to finish a run of a sequence merges all of them. All working threads; ends with a barrier.
  __device__ void merge_if_last() const {
    sync_workers();  // all have folded and stored: the exchange may hold rows of Q again
    if (unit.partial < 0) return;
    const auto runs = static_cast<std::uint32_t>(unit.runs);
    auto& arrived_before = *this->template at<std::uint32_t>(layout.flag);
    if (threadIdx.x == 0) {
      std::uint32_t* count = work.arrived + unit.partial - std::int64_t{unit.run} * unit.stride;
      arrived_before = count_arrival(count);
      if (arrived_before + 1 == runs) *count = 0;  // for a launch without a schedule kernel ahead
    }
    sync_workers();
    if (arrived_before + 1 == runs) {
#pragma unroll 1
      for (int i = 0; i < S::kItems; ++i) {
        const Item of = item(i);
        if (has_item(of)) write(of, merge(of));
      }
    }
    sync_workers();  // the flag is free again
  }

  // Of all threads but those of the copying warps.
  static __device__ void sync_workers() {
    sync_threads<S::kWorkers>(1);
  }
};

}  // namespace octavo::cuda::decode
