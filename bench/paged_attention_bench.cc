// One call of the operator, planned once and run again and again: decode and prefill, over several cache types.
//
//   octavo_bench [--benchmark_filter=decode] [--benchmark_out=FILE --benchmark_out_format=json]
//
// kv_bytes/s is the rate at which stored keys and values are consumed; the caches of the long decode rows (0.3 to 1 GB)
// exceed most last-level caches, so there it is a memory rate. Every run appends the same tokens at the same place.
#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "octavo/paged_attention.h"
#include "support/call.h"
#include "support/case.h"

namespace {

using octavo::CacheType;
using octavo::ElementType;
using octavo::QuantType;
using octavo::testing::Case;

struct Shape {
  const char* name;
  std::int64_t batch;
  std::int64_t past;
  std::int64_t added;
};

struct Types {
  const char* name;
  ElementType type;
  CacheType cache;
  QuantType quant;
};

constexpr Shape kShapes[] = {
    {"decode_short", 16, 512, 1},
    {"decode_long", 16, 8192, 1},
    {"prefill", 1, 0, 1024},
    {"prefill_chunk", 4, 2048, 128},
};

constexpr Types kTypes[] = {
    {"float32", ElementType::kFloat32, CacheType::kTensorType, QuantType::kNone},
    {"float32_float16_cache", ElementType::kFloat32, CacheType::kFloat16, QuantType::kNone},
    {"float32_int8_cache", ElementType::kFloat32, CacheType::kInt8, QuantType::kPerChannel},
};

Case make_case(const Shape& shape, const Types& types) {
  Case c;
  c.num_heads = 32;
  c.kv_num_heads = 8;
  c.head_size = 128;
  c.past.assign(static_cast<std::size_t>(shape.batch), shape.past);
  c.added.assign(static_cast<std::size_t>(shape.batch), shape.added);
  c.type = types.type;
  c.hostile = false;
  return with_cache(c, types.cache, types.quant, types.cache, types.quant);
}

void paged_attention(benchmark::State& state, const Shape& shape, const Types& types) {
  const Case spec = make_case(shape, types);
  const octavo::testing::Call call(spec);
  octavo::Problem problem;
  octavo::Plan plan;
  octavo::Status status = octavo::validate(call.arguments, call.attributes, problem);
  if (status.ok()) status = octavo::plan(problem, {}, plan);
  std::vector<std::byte> memory(plan.workspace_bytes() + octavo::kWorkspaceAlignment);
  const octavo::Workspace workspace = octavo::aligned_workspace(memory.data(), memory.size());
  for (auto _ : state) {
    if (status.ok()) status = octavo::run(plan, call.arguments, workspace, {});
    if (!status.ok()) {
      state.SkipWithError(status.message().c_str());
      break;
    }
  }
  const std::int64_t row = octavo::row_bytes(spec.k_format(), spec.head_size);
  const std::int64_t kv_bytes = 2 * row * spec.kv_num_heads * shape.batch * (shape.past + shape.added);
  state.counters["kv_bytes/s"] =
      benchmark::Counter(static_cast<double>(kv_bytes), benchmark::Counter::kIsIterationInvariantRate);
  state.counters["tokens/s"] =
      benchmark::Counter(static_cast<double>(spec.token_count()), benchmark::Counter::kIsIterationInvariantRate);
  state.SetLabel(std::string(plan.backend_name()));
}

}  // namespace

int main(int argc, char** argv) {
  for (const Shape& shape : kShapes) {
    for (const Types& types : kTypes) {
      const std::string name = std::string(shape.name) + "/" + types.name;
      benchmark::RegisterBenchmark(name.c_str(), [&](benchmark::State& state) { paged_attention(state, shape, types); })
          ->UseRealTime()
          ->Unit(benchmark::kMillisecond);
    }
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
