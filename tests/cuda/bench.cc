// GPU benchmark: small, for the record in docs/gpu_check.json. Each row is a CUDA graph of calls that go round distinct
// caches, so that nothing stays in L2; the median of several replays divided by the calls.
//   octavo_cuda_bench [FILE.json [WORDS OF THE ROWS TO RUN]]
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda/call.h"
#include "cuda/prologue/kernel.h"
#include "cuda/schedule/kernel.h"
#include "octavo/paged_attention.h"

namespace octavo {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
void check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

// Freed when the process ends.
void* allocate(std::size_t bytes) {
  void* data = nullptr;
  check(cudaMalloc(&data, std::max<std::size_t>(bytes, 16)), "cudaMalloc");
  return data;
}

struct Work {
  std::string name;
  std::int64_t num_heads = 64, kv_num_heads = 8, head_size = 64;
  std::int64_t batch = 32, past = 1023, added = 1;
  std::int64_t block_size = 16;
  ElementType type = ElementType::kFloat16;
  ElementType cache = ElementType::kFloat16;
  bool rotary = false;
  enum class Part { kCall, kScheduleAndStore, kSchedule } part = Part::kCall;  // which of a call's kernels
  float softcap = 0.0f;
  std::int64_t window = -1;
};

// Pseudo-random finite bytes of 16-bit floats near 1, or codes.
void fill(void* device, std::size_t bytes, ElementType type, std::uint32_t seed) {
  std::vector<std::uint8_t> host(std::min<std::size_t>(bytes, std::size_t{1} << 22));
  std::mt19937 random(seed);
  for (std::size_t i = 0; i + 1 < host.size(); i += 2) {
    const auto r = static_cast<std::uint32_t>(random());
    host[i] = static_cast<std::uint8_t>(r);
    host[i + 1] = static_cast<std::uint8_t>(r >> 8);
    if (type == ElementType::kFloat16) host[i + 1] = static_cast<std::uint8_t>((host[i + 1] & 0x83u) | 0x34u);
    if (type == ElementType::kBFloat16) host[i + 1] = static_cast<std::uint8_t>((host[i + 1] & 0x80u) | 0x3eu);
    if (type == ElementType::kFloat8E4M3FN) {
      host[i] &= 0xb7u;
      host[i + 1] &= 0xb7u;
    }
  }
  for (std::size_t at = 0; at < bytes; at += host.size()) {
    check(cudaMemcpy(static_cast<std::uint8_t*>(device) + at, host.data(), std::min(host.size(), bytes - at),
                     cudaMemcpyHostToDevice),
          "fill");
  }
}

struct Row {
  double microseconds, bytes, flops;
};

Row measure(const Work& work, cudaStream_t stream) {
  const std::int64_t tokens = work.batch * work.added;
  const std::int64_t length = work.past + work.added;
  const std::int64_t columns = (length + work.block_size - 1) / work.block_size;
  const std::int64_t blocks = work.batch * columns;
  const std::int64_t row = work.kv_num_heads * work.head_size;
  const auto t = static_cast<std::int64_t>(size_in_bytes(work.type));
  const auto c = static_cast<std::int64_t>(size_in_bytes(work.cache));
  const auto cache_bytes = static_cast<std::size_t>(blocks * work.block_size * row * c);
  const int calls = static_cast<int>(std::clamp<std::size_t>((std::size_t{500} << 20) / (2 * cache_bytes) + 1, 2, 24));

  Arguments a;
  const auto tensor = [&](ElementType type, std::initializer_list<std::int64_t> shape) {
    MutableTensorView view(nullptr, type, shape);
    const std::size_t bytes = static_cast<std::size_t>(view.element_count()) * size_in_bytes(type);
    view.data = allocate(bytes);
    fill(view.data, bytes, type, 7);
    return view;
  };
  const auto integers = [&](const std::vector<std::int32_t>& values, std::initializer_list<std::int64_t> shape) {
    MutableTensorView view(allocate(values.size() * 4), ElementType::kInt32, shape);
    check(cudaMemcpy(view.data, values.data(), values.size() * 4, cudaMemcpyHostToDevice), "copy");
    return view;
  };
  a.query = tensor(work.type, {tokens, work.num_heads * work.head_size});
  a.key = tensor(work.type, {tokens, row});
  a.value = tensor(work.type, {tokens, row});
  a.output = tensor(work.type, {tokens, work.num_heads * work.head_size});
  std::vector<std::int32_t> cumulative, past, table(static_cast<std::size_t>(blocks));
  for (std::int64_t b = 0; b <= work.batch; ++b) cumulative.push_back(static_cast<std::int32_t>(b * work.added));
  past.assign(static_cast<std::size_t>(work.batch), static_cast<std::int32_t>(work.past));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(11));
  a.cumulative_sequence_length = integers(cumulative, {work.batch + 1});
  a.past_seqlens = integers(past, {work.batch});
  a.block_table = integers(table, {work.batch, columns});
  if (work.rotary) {
    a.cos_cache = tensor(work.type, {length, work.head_size / 2});
    a.sin_cache = tensor(work.type, {length, work.head_size / 2});
  }
  Attributes attributes{.num_heads = work.num_heads, .kv_num_heads = work.kv_num_heads};
  attributes.do_rotary = work.rotary ? 1 : 0;
  attributes.softcap = work.softcap;
  attributes.local_window_size = work.window;
  if (work.cache != work.type) {
    attributes.k_quant_type = attributes.v_quant_type = QuantType::kPerTensor;
    const float scale = 0.02f;
    for (TensorView* view : {&a.k_scale, &a.v_scale}) {
      MutableTensorView made(allocate(4), ElementType::kFloat32, {1});
      check(cudaMemcpy(made.data, &scale, 4, cudaMemcpyHostToDevice), "copy");
      *view = made;
    }
  }

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  Plan decision;
  void* workspace = nullptr;
  std::vector<Arguments> rounds;
  for (int i = 0; i < calls; ++i) {
    a.key_cache = tensor(work.cache, {blocks, work.block_size, work.kv_num_heads, work.head_size});
    a.value_cache = tensor(work.cache, {blocks, work.block_size, work.kv_num_heads, work.head_size});
    rounds.push_back(a);
  }
  Problem problem;
  check(validate(a, attributes, problem));
  PlanOptions options;
  options.device = DeviceKind::kCuda;
  check(plan(problem, options, decision));
  workspace = allocate(decision.workspace_bytes());
  RunContext context;
  context.stream = stream;
  const auto call = [&](const Arguments& arguments) {
    if (work.part == Work::Part::kCall) {
      check(run(decision, arguments, {workspace, decision.workspace_bytes()}, context));
      return;
    }
    cuda::Scratch scratch;
    cuda::carve(problem, workspace, scratch);
    const cuda::Call kernels = cuda::make_call(problem, arguments, scratch);
    check(cuda::launch_schedule(kernels, stream), "schedule");
    if (work.part == Work::Part::kScheduleAndStore) check(cuda::launch_prologue(kernels, stream), "prologue");
  };
  call(a);
  check(cudaStreamSynchronize(stream), "first run");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  for (const Arguments& arguments : rounds) call(arguments);
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  // The clocks come up while the card works.
  double warm_ms = 0.0;
  std::vector<double> times;
  while (times.size() < 9) {
    check(cudaEventRecord(begin, stream), "event");
    check(cudaGraphLaunch(executable, stream), "replay");
    check(cudaEventRecord(end, stream), "event");
    check(cudaEventSynchronize(end), "replay");
    float ms = 0.0f;
    check(cudaEventElapsedTime(&ms, begin, end), "event");
    if (warm_ms > 100.0) times.push_back(1000.0 * static_cast<double>(ms) / calls);
    warm_ms += static_cast<double>(ms);
  }
  std::sort(times.begin(), times.end());
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  for (const Arguments& arguments : rounds) {
    cudaFree(arguments.key_cache.data);
    cudaFree(arguments.value_cache.data);
  }
  cudaFree(workspace);

  const double new_tokens = static_cast<double>(tokens);
  double seen = static_cast<double>(length);
  if (attributes.local_window_size > 0)
    seen = std::min(seen, static_cast<double>(attributes.local_window_size + work.added - 1));
  Row result{};
  result.microseconds = times[times.size() / 2];
  if (work.part == Work::Part::kSchedule) return result;
  if (work.part == Work::Part::kScheduleAndStore) {  // K and V once in T, once in the cache's type
    result.bytes = new_tokens * static_cast<double>(2 * row * (t + c));
    return result;
  }
  // Each needed byte once: Q, K, V and the output in T, the caches read by attention and written by the prologue.
  result.bytes = new_tokens * static_cast<double>((2 * work.num_heads + 2 * work.kv_num_heads) * work.head_size * t) +
                 (static_cast<double>(work.batch) * seen + new_tokens) * static_cast<double>(2 * row * c);
  const double pairs =
      static_cast<double>(work.batch) * (static_cast<double>(work.added) * static_cast<double>(work.past) +
                                         0.5 * static_cast<double>(work.added) * static_cast<double>(work.added + 1));
  result.flops =
      attributes.local_window_size > 0 ? 0.0 : 4.0 * pairs * static_cast<double>(work.num_heads * work.head_size);
  return result;
}

std::vector<Work> works() {
  std::vector<Work> list;
  const auto decode = [&list](const char* name, ElementType cache, std::int64_t batch, std::int64_t context) {
    Work w;
    w.name = name;
    w.batch = batch;
    w.past = context - 1;
    w.cache = cache;
    list.push_back(w);
  };
  decode("float16 64/8x64 1024x32", ElementType::kFloat16, 32, 1024);
  decode("float16 64/8x64 4096x32", ElementType::kFloat16, 32, 4096);
  decode("float16 64/8x64 16384x8", ElementType::kFloat16, 8, 16384);
  Work base = list[1];
  Work w = base;
  w.name = "float16 64/8x64 4096x32 softcap";
  w.softcap = 30.0f;
  list.push_back(w);
  w = base;
  w.name = "float16 64/8x64 4096x32 rope";
  w.rotary = true;
  list.push_back(w);
  w = list[2];
  w.name = "float16 64/8x64 16384x8 window 1024";
  w.window = 1024;
  list.push_back(w);
  decode("int8 64/8x64 4096x32", ElementType::kInt8, 32, 4096);
  decode("float8e4m3fn 64/8x64 4096x32", ElementType::kFloat8E4M3FN, 32, 4096);
  w = base;
  w.name = "bfloat16 32/8x128 4096x32";
  w.num_heads = 32;
  w.head_size = 128;
  w.type = w.cache = ElementType::kBFloat16;
  list.push_back(w);
  w.name = "bfloat16 32/8x128 4x4096+0 page 16";
  w.batch = 4;
  w.past = 0;
  w.added = 4096;
  list.push_back(w);
  w.batch = 8;
  w.added = 1024;
  w.part = Work::Part::kSchedule;
  w.name = "schedule alone, 8 sequences";
  list.push_back(w);
  w.part = Work::Part::kScheduleAndStore;
  w.name = "bfloat16 store 8192 tokens 8x128";
  list.push_back(w);
  w.rotary = true;
  w.name = "bfloat16 store 8192 tokens 8x128 rope";
  list.push_back(w);
  w.cache = ElementType::kInt8;
  w.name = "bfloat16 store 8192 tokens 8x128 rope int8";
  list.push_back(w);
  return list;
}

}  // namespace
}  // namespace octavo

int main(int argc, char** argv) {
  using namespace octavo;
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  std::string json = "[";
  for (const Work& work : works()) {
    if (argc > 2 && work.name.find(argv[2]) == std::string::npos) continue;
    const Row row = measure(work, stream);
    const double tb_per_s = row.bytes / row.microseconds / 1e6;
    const double tflops = row.flops / row.microseconds / 1e6;
    std::printf("%-40s %9.1f us  %5.2f TB/s  %6.1f TFLOP/s\n", work.name.c_str(), row.microseconds, tb_per_s, tflops);
    char text[256];
    std::snprintf(text, sizeof(text),
                  "%s\n  {\"work\": \"%s\", \"ours_us\": %.1f, \"tb_per_s\": %.2f, \"tflops\": %.1f}",
                  json.size() > 1 ? "," : "", work.name.c_str(), row.microseconds, tb_per_s, tflops);
    json += text;
  }
  json += "\n]\n";
  if (argc > 1) {
    std::FILE* file = std::fopen(argv[1], "w");
    if (file == nullptr || std::fputs(json.c_str(), file) < 0 || std::fclose(file) != 0) return 1;
  }
  return 0;
}
