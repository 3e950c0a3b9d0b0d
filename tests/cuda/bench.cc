// GPU benchmark: small, for the record in docs/gpu_check.json. Each row is a CUDA graph of calls that go round distinct
// caches, so that nothing stays in L2; the median of several replays divided by the calls.
//   octavo_cuda_bench [FILE.json [WORDS OF THE ROWS TO RUN]]
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
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

void* allocate(std::size_t bytes) {
  void* data = nullptr;
  check(cudaMalloc(&data, std::max<std::size_t>(bytes, 16)), "cudaMalloc");
  return data;
}

// One row: a plain call, and what it has besides.
struct Work {
  std::string name;
  std::string plain;  // the row of the same call without its feature
  std::int64_t num_heads = 64, kv_num_heads = 8, head_size = 64;
  std::int64_t batch = 32, past = 1023, added = 1;
  std::int64_t block_size = 16;
  ElementType type = ElementType::kFloat16;
  CacheType cache = CacheType::kFloat16;
  QuantType quant = QuantType::kPerTensor;  // of caches that have scales
  enum class Part {
    kCall,
    kScheduleAndStore,
    kSchedule,
    kStore,
    kCopy
  } part = Part::kCall;  // which of a call's kernels
  float softcap = 0.0f;
  std::int64_t window = -1;
  bool rotary = false, norm = false, sink = false, lse = false, bias = false, positions = false, causal = true;
  bool head_major = false, wide_tables = false, slots = false;
};

// How a cache of this type is stored.
ElementType storage_of(CacheType type) {
  switch (type) {
    case CacheType::kFloat32: return ElementType::kFloat32;
    case CacheType::kBFloat16: return ElementType::kBFloat16;
    case CacheType::kInt8: return ElementType::kInt8;
    case CacheType::kFloat8E4M3FN: return ElementType::kFloat8E4M3FN;
    case CacheType::kInt4:
    case CacheType::kFloat4E2M1: return ElementType::kUint8;
    default: return ElementType::kFloat16;
  }
}

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

// Tensors of a call in device memory, freed with the object.
class Tensors {
 public:
  ~Tensors() {
    for (void* data : allocated_) cudaFree(data);
  }
  MutableTensorView random(ElementType type, std::initializer_list<std::int64_t> shape) {
    MutableTensorView view(nullptr, type, shape);
    const std::size_t bytes = static_cast<std::size_t>(view.element_count()) * size_in_bytes(type);
    view.data = take(bytes);
    fill(view.data, bytes, type, 7);
    return view;
  }
  template <typename Number>
  MutableTensorView of(const std::vector<Number>& values, std::initializer_list<std::int64_t> shape) {
    const ElementType type = std::is_same_v<Number, float>          ? ElementType::kFloat32
                             : std::is_same_v<Number, std::int64_t> ? ElementType::kInt64
                                                                    : ElementType::kInt32;
    MutableTensorView view(take(values.size() * sizeof(Number)), type, shape);
    check(cudaMemcpy(view.data, values.data(), values.size() * sizeof(Number), cudaMemcpyHostToDevice), "copy");
    return view;
  }
  void* take(std::size_t bytes) {
    allocated_.push_back(allocate(bytes));
    return allocated_.back();
  }

 private:
  std::vector<void*> allocated_;
};

// Median time of a replay of `calls` calls, divided by their number.
template <typename Call>
double time_of(int calls, const Call& call, cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  for (int i = 0; i < calls; ++i) call(i);
  check(cudaStreamSynchronize(stream), "first run");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  for (int i = 0; i < calls; ++i) call(i);
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  double warm_ms = 0.0;  // the clocks come up while the card works
  std::vector<double> times;
  while (times.size() < 9) {
    check(cudaEventRecord(begin, stream), "event");
    check(cudaGraphLaunch(executable, stream), "replay");
    check(cudaEventRecord(end, stream), "event");
    check(cudaEventSynchronize(end), "replay");
    float ms = 0.0f;
    check(cudaEventElapsedTime(&ms, begin, end), "event");
    if (warm_ms > 50.0) times.push_back(1000.0 * static_cast<double>(ms) / calls);
    warm_ms += static_cast<double>(ms);
  }
  std::sort(times.begin(), times.end());
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  return times[times.size() / 2];
}

MutableTensorView random_cache(const Work& work, std::int64_t blocks, Tensors& tensors) {
  const std::int64_t stored =
      row_bytes(work.cache, work.head_size) / static_cast<std::int64_t>(size_in_bytes(storage_of(work.cache)));
  MutableTensorView view = tensors.random(storage_of(work.cache), {blocks, work.block_size, work.kv_num_heads, stored});
  if (work.head_major) {
    view.strides[1] = stored;
    view.strides[2] = work.block_size * stored;
  }
  return view;
}

// The call of a row, but for what goes round: K, V and the caches.
Arguments make_arguments(const Work& work, std::int64_t blocks, Attributes& attributes, Tensors& tensors) {
  const std::int64_t tokens = work.batch * work.added;
  const std::int64_t length = work.past + work.added;
  const std::int64_t columns = blocks / work.batch;
  Arguments a;
  a.query = tensors.random(work.type, {tokens, work.num_heads * work.head_size});
  a.output = tensors.random(work.type, {tokens, work.num_heads * work.head_size});
  std::vector<std::int32_t> cumulative,
      past(static_cast<std::size_t>(work.batch), static_cast<std::int32_t>(work.past));
  for (std::int64_t b = 0; b <= work.batch; ++b) cumulative.push_back(static_cast<std::int32_t>(b * work.added));
  std::vector<std::int32_t> table(static_cast<std::size_t>(blocks));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(11));
  a.cumulative_sequence_length = tensors.of(cumulative, {work.batch + 1});
  a.past_seqlens = tensors.of(past, {work.batch});
  a.block_table = tensors.of(table, {work.batch, columns});
  if (work.wide_tables) {
    a.block_table = tensors.of(std::vector<std::int64_t>(table.begin(), table.end()), {work.batch, columns});
  }
  std::vector<std::int32_t> positions, slots;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t position = work.past + t % work.added;
    const auto entry = static_cast<std::size_t>(t / work.added * columns + position / work.block_size);
    positions.push_back(static_cast<std::int32_t>(position));
    slots.push_back(static_cast<std::int32_t>(table[entry] * work.block_size + position % work.block_size));
  }
  if (work.positions) a.query_positions = tensors.of(positions, {tokens});
  if (work.slots) a.slot_mapping = tensors.of(slots, {tokens});
  if (work.rotary) {
    a.cos_cache = tensors.random(work.type, {length, work.head_size / 2});
    a.sin_cache = tensors.random(work.type, {length, work.head_size / 2});
  }
  if (work.norm) {
    a.q_norm_weight = tensors.random(work.type, {work.head_size});
    a.k_norm_weight = tensors.random(work.type, {work.head_size});
  }
  if (work.sink) a.head_sink = tensors.random(work.type, {work.num_heads});
  if (work.lse) a.lse = tensors.random(ElementType::kFloat32, {work.num_heads, tokens});
  if (work.bias) a.attention_bias = tensors.random(work.type, {work.batch, work.num_heads, work.added, length});
  attributes.num_heads = work.num_heads;
  attributes.kv_num_heads = work.kv_num_heads;
  attributes.do_rotary = work.rotary ? 1 : 0;
  attributes.softcap = work.softcap;
  attributes.local_window_size = work.window;
  attributes.is_causal = work.causal ? 1 : 0;
  if (row_bytes(work.cache, 8) < 16) {
    attributes.k_cache_dtype = attributes.v_cache_dtype = work.cache;
    attributes.k_quant_type = attributes.v_quant_type = work.quant;
    const bool per_channel = work.quant == QuantType::kPerChannel;
    const std::vector<float> scales(per_channel ? static_cast<std::size_t>(work.kv_num_heads * work.head_size) : 1,
                                    0.02f);
    for (TensorView* view : {&a.k_scale, &a.v_scale}) {
      *view = per_channel ? tensors.of(scales, {work.kv_num_heads, 1, work.head_size}) : tensors.of(scales, {1});
    }
  }
  return a;
}

Row measure(const Work& work, cudaStream_t stream) {
  const std::int64_t tokens = work.batch * work.added;
  const std::int64_t length = work.past + work.added;
  const std::int64_t blocks = work.batch * ((length + work.block_size - 1) / work.block_size);
  const std::int64_t row = work.kv_num_heads * work.head_size;
  const auto t = static_cast<std::int64_t>(size_in_bytes(work.type));
  const double cached = static_cast<double>(work.kv_num_heads * row_bytes(work.cache, work.head_size));
  const auto round_bytes = static_cast<std::size_t>(2.0 * static_cast<double>(blocks * work.block_size) * cached) +
                           static_cast<std::size_t>(2 * tokens * row * t);
  const int calls = static_cast<int>(std::clamp<std::size_t>((std::size_t{500} << 20) / round_bytes + 1, 2, 24));

  Tensors tensors;
  Attributes attributes;
  Arguments a = make_arguments(work, blocks, attributes, tensors);
  std::vector<Arguments> rounds;
  for (int i = 0; i < calls; ++i) {
    a.key = tensors.random(work.type, {tokens, row});
    a.value = tensors.random(work.type, {tokens, row});
    a.key_cache = random_cache(work, blocks, tensors);
    a.value_cache = random_cache(work, blocks, tensors);
    rounds.push_back(a);
  }
  Problem problem;
  check(validate(a, attributes, problem));
  PlanOptions options;
  options.device = DeviceKind::kCuda;
  options.backend = "cuda_general";  // bench/gpu times the decode backend
  Plan decision;
  check(plan(problem, options, decision));
  void* workspace = tensors.take(decision.workspace_bytes());
  RunContext context;
  context.stream = stream;
  cuda::Scratch scratch;
  cuda::Carver carver(workspace);
  cuda::carve(problem, carver, scratch);
  const auto call = [&](int i) {
    const Arguments& arguments = rounds[static_cast<std::size_t>(i)];
    if (work.part == Work::Part::kCall) {
      check(run(decision, arguments, {workspace, decision.workspace_bytes()}, context));
      return;
    }
    if (work.part == Work::Part::kCopy) {
      const auto bytes = static_cast<std::size_t>(tokens * row * t);
      for (const auto& [to, from] : {std::pair(arguments.key_cache.data, arguments.key.data),
                                     std::pair(arguments.value_cache.data, arguments.value.data)}) {
        check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "copy");
      }
      return;
    }
    const cuda::Call kernels = cuda::make_call(problem, arguments, scratch);
    if (work.part != Work::Part::kStore) check(cuda::launch_schedule(kernels, stream), "schedule");
    if (work.part != Work::Part::kSchedule) check(cuda::launch_prologue(kernels, stream), "prologue");
  };
  // The store alone works with what an earlier schedule has left.
  if (work.part == Work::Part::kStore) {
    check(cuda::launch_schedule(cuda::make_call(problem, a, scratch), stream), "schedule");
  }
  Row result{};
  result.microseconds = time_of(calls, call, stream);
  if (work.part == Work::Part::kSchedule) return result;
  const double new_tokens = static_cast<double>(tokens);
  const double stored = new_tokens * 2.0 * (static_cast<double>(row * t) + cached);  // K and V read in T and written
  result.bytes = stored;
  if (work.part != Work::Part::kCall) return result;
  // Each needed byte once: besides K and V, Q and the output in T, and what attention reads of the caches.
  double seen = static_cast<double>(length);
  if (work.window > 0) seen = std::min(seen, static_cast<double>(work.window + work.added - 1));
  result.bytes += new_tokens * static_cast<double>(2 * work.num_heads * work.head_size * t) +
                  static_cast<double>(work.batch) * seen * 2.0 * cached;
  if (work.bias) result.bytes += new_tokens * static_cast<double>(work.num_heads * length * t);
  const double pairs =
      static_cast<double>(work.batch) * (static_cast<double>(work.added) * static_cast<double>(work.past) +
                                         0.5 * static_cast<double>(work.added) * static_cast<double>(work.added + 1));
  result.flops = work.window > 0 ? 0.0 : 4.0 * pairs * static_cast<double>(work.num_heads * work.head_size);
  return result;
}

// Attention of one query token a sequence, and the same call with a feature each.
void add_decode(std::vector<Work>& list) {
  const auto decode = [&list](const char* name, std::int64_t batch, std::int64_t context) {
    Work w;
    w.name = name;
    w.batch = batch;
    w.past = context - 1;
    list.push_back(w);
    return w;
  };
  decode("float16 64/8x64 1024x32", 32, 1024);
  const Work base = decode("float16 64/8x64 4096x32", 32, 4096);
  const Work longer = decode("float16 64/8x64 16384x8", 8, 16384);
  const auto with = [&list](const Work& plain, const char* feature, const auto& change) {
    Work w = plain;
    w.plain = plain.name;
    w.name = plain.name + " " + feature;
    change(w);
    list.push_back(w);
  };
  with(base, "softcap", [](Work& w) { w.softcap = 30.0f; });
  with(base, "rope", [](Work& w) { w.rotary = true; });
  with(base, "norm", [](Work& w) { w.norm = true; });
  with(base, "sink", [](Work& w) { w.sink = true; });
  with(base, "lse", [](Work& w) { w.lse = true; });
  with(base, "bias", [](Work& w) { w.bias = true; });
  with(base, "positions", [](Work& w) { w.positions = true; });
  with(base, "slots", [](Work& w) { w.slots = true; });
  with(base, "not causal", [](Work& w) { w.causal = false; });
  with(base, "int64 tables", [](Work& w) { w.wide_tables = true; });
  with(base, "head-major", [](Work& w) { w.head_major = true; });
  with(base, "page 1", [](Work& w) { w.block_size = 1; });
  with(base, "page 512", [](Work& w) { w.block_size = 512; });
  with(longer, "window 1024", [](Work& w) { w.window = 1024; });
  const auto cached = [&base](CacheType type, QuantType quant, const char* name) {
    Work w = base;
    w.plain = base.name;
    w.cache = type;
    w.quant = quant;
    w.name = std::string(name) + " 64/8x64 4096x32";
    if (quant == QuantType::kPerChannel) w.name += " channel";
    return w;
  };
  for (const QuantType quant : {QuantType::kPerTensor, QuantType::kPerChannel}) {
    list.push_back(cached(CacheType::kInt8, quant, "int8"));
    list.push_back(cached(CacheType::kFloat8E4M3FN, quant, "float8e4m3fn"));
    list.push_back(cached(CacheType::kInt4, quant, "int4"));
    list.push_back(cached(CacheType::kFloat4E2M1, quant, "float4e2m1"));
  }
  Work w = base;
  w.name = "bfloat16 32/8x128 4096x32";
  w.num_heads = 32;
  w.head_size = 128;
  w.type = ElementType::kBFloat16;
  w.cache = CacheType::kBFloat16;
  list.push_back(w);
  w.name = "bfloat16 32/8x128 4x4096+0 page 16";
  w.batch = 4;
  w.past = 0;
  w.added = 4096;
  list.push_back(w);
}

// What a call does before attention: the store alone, beside a copy of as many bytes.
void add_store(std::vector<Work>& list) {
  Work base;
  base.num_heads = 32;
  base.head_size = 128;
  base.type = ElementType::kBFloat16;
  base.cache = CacheType::kBFloat16;
  base.batch = 8;
  base.past = 0;
  base.added = 1024;
  base.part = Work::Part::kSchedule;
  base.name = "schedule alone, 8 sequences";
  list.push_back(base);
  base.part = Work::Part::kCopy;
  base.name = "two copies of 8192 tokens 8x128";
  list.push_back(base);
  base.part = Work::Part::kStore;
  const auto store = [&list](const Work& plain, const char* name, const auto& change) {
    Work w = plain;
    w.name = name;
    change(w);
    list.push_back(w);
  };
  const auto quantised = [](CacheType type, QuantType quant) {
    return [type, quant](Work& w) {
      w.rotary = true;
      w.cache = type;
      w.quant = quant;
    };
  };
  store(base, "bfloat16 store 8192 tokens 8x128", [](Work&) {});
  store(base, "bfloat16 store 8192 tokens 8x128 rope", [](Work& w) { w.rotary = true; });
  store(base, "bfloat16 store 8192 tokens 8x128 norm rope", [](Work& w) { w.norm = w.rotary = true; });
  store(base, "bfloat16 store 8192 tokens 8x128 rope int8", quantised(CacheType::kInt8, QuantType::kPerTensor));
  store(base, "bfloat16 store 8192 tokens 8x128 rope int8 channel",
        quantised(CacheType::kInt8, QuantType::kPerChannel));
  store(base, "bfloat16 store 8192 tokens 8x128 rope float8e4m3fn",
        quantised(CacheType::kFloat8E4M3FN, QuantType::kPerTensor));
  store(base, "bfloat16 store 8192 tokens 8x128 rope int4 channel",
        quantised(CacheType::kInt4, QuantType::kPerChannel));
  Work step = base;
  step.batch = 32;
  step.past = 1023;
  step.added = 1;
  store(step, "bfloat16 store 32 tokens 8x128", [](Work&) {});
  store(step, "bfloat16 store 32 tokens 8x128 rope int8", quantised(CacheType::kInt8, QuantType::kPerTensor));
}

std::vector<Work> works() {
  std::vector<Work> list;
  add_decode(list);
  add_store(list);
  return list;
}

}  // namespace
}  // namespace octavo

int main(int argc, char** argv) {
  using namespace octavo;
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  std::string json = "[";
  std::map<std::string, Row> rows;
  for (const Work& work : works()) {
    if (argc > 2 && work.name.find(argv[2]) == std::string::npos) continue;
    const Row row = measure(work, stream);
    rows[work.name] = row;
    const double tb_per_s = row.bytes / row.microseconds / 1e6;
    const double tflops = row.flops / row.microseconds / 1e6;
    const auto plain = rows.find(work.plain);
    // A window reads less than the plain call: it is compared by the byte.
    double ratio = plain == rows.end() ? 0.0 : row.microseconds / plain->second.microseconds;
    if (work.window > 0 && plain != rows.end()) ratio *= plain->second.bytes / row.bytes;
    std::printf("%-52s %9.2f us  %5.2f TB/s  %6.1f TFLOP/s", work.name.c_str(), row.microseconds, tb_per_s, tflops);
    if (ratio > 0.0) std::printf("  %.2f of plain", ratio);
    std::printf("\n");
    char text[320];
    std::snprintf(text, sizeof(text),
                  "%s\n  {\"work\": \"%s\", \"ours_us\": %.2f, \"tb_per_s\": %.2f, \"tflops\": %.1f",
                  json.size() > 1 ? "," : "", work.name.c_str(), row.microseconds, tb_per_s, tflops);
    json += text;
    if (ratio > 0.0) {
      std::snprintf(text, sizeof(text), ", \"of_plain\": %.2f", ratio);
      json += text;
    }
    json += "}";
  }
  json += "\n]\n";
  if (argc > 1) {
    std::FILE* file = std::fopen(argv[1], "w");
    if (file == nullptr || std::fputs(json.c_str(), file) < 0 || std::fclose(file) != 0) return 1;
  }
  return 0;
}
