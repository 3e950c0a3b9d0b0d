#include "cpu/backend.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "cpu/kernels.h"
#include "cpu/schedule.h"

namespace octavo::cpu {
namespace {

// Named one by one, so that a new feature is not taken for supported before somebody has looked.
constexpr FeatureSet kFeatures = Feature::kPackedQkv | Feature::kSlotMapping | Feature::kRope | Feature::kQkNorm |
                                 Feature::kHeadSink | Feature::kSoftcap | Feature::kLocalWindow | Feature::kNonCausal |
                                 Feature::kAttentionBias | Feature::kQueryPositions | Feature::kOutputQk |
                                 Feature::kLse | Feature::kLatent | Feature::kQuantizedCache |
                                 Feature::kPerChannelScale | Feature::kFourBitCache | Feature::kStridedCache |
                                 Feature::kInt64Indices | Feature::kSmallBlocks;

Cache make_cache(const MutableTensorView& view, const CacheFormat& format, const TensorView& scale) noexcept {
  const auto bytes = static_cast<std::int64_t>(size_in_bytes(view.type));
  Cache cache;
  cache.data = static_cast<std::byte*>(view.data);
  cache.block_bytes = view.strides[0] * bytes;
  cache.slot_bytes = view.strides[1] * bytes;
  cache.head_bytes = view.strides[2] * bytes;
  cache.type = format.logical;
  if (format.quant != QuantType::kNone) cache.scale = static_cast<const float*>(scale.data);
  cache.per_channel = format.quant == QuantType::kPerChannel;
  return cache;
}

const std::byte* bytes_of(const TensorView& view) noexcept {
  return static_cast<const std::byte*>(view.data);
}

IndexArray make_indices(const TensorView& view) noexcept {
  return {view.data, view.type == ElementType::kInt64};
}

}  // namespace

Call make_call(const Problem& problem, const Arguments& arguments) noexcept {
  const auto element = static_cast<std::int64_t>(size_in_bytes(problem.element_type));
  const std::int64_t head_bytes = problem.head_size * element;
  Call call;
  call.problem = &problem;
  if (problem.has(Feature::kPackedQkv)) {
    const std::int64_t token_bytes = (problem.num_heads + 2 * problem.kv_num_heads) * head_bytes;
    const std::byte* query = bytes_of(arguments.query);
    call.query = {query, token_bytes, head_bytes};
    call.key = {query + problem.num_heads * head_bytes, token_bytes, head_bytes};
    call.value = {query + (problem.num_heads + problem.kv_num_heads) * head_bytes, token_bytes, head_bytes};
  } else {
    call.query = {bytes_of(arguments.query), problem.num_heads * head_bytes, head_bytes};
    call.key = {bytes_of(arguments.key), problem.kv_num_heads * head_bytes, head_bytes};
    call.value = {bytes_of(arguments.value), problem.kv_num_heads * head_bytes, head_bytes};
  }
  call.k_cache = make_cache(arguments.key_cache, problem.k_cache, arguments.k_scale);
  if (problem.cache_layout == CacheLayout::kSeparate) {
    call.v_cache = make_cache(arguments.value_cache, problem.v_cache, arguments.v_scale);
  }
  call.cumulative = static_cast<const std::int32_t*>(arguments.cumulative_sequence_length.data);
  call.past = static_cast<const std::int32_t*>(arguments.past_seqlens.data);
  if (problem.has(Feature::kQueryPositions))
    call.positions = static_cast<const std::int32_t*>(arguments.query_positions.data);
  call.block_table = make_indices(arguments.block_table);
  if (problem.has(Feature::kSlotMapping)) call.slot_mapping = make_indices(arguments.slot_mapping);
  call.cos = bytes_of(arguments.cos_cache);
  call.sin = bytes_of(arguments.sin_cache);
  if (problem.has(Feature::kHeadSink)) call.sink = bytes_of(arguments.head_sink);
  call.q_norm = bytes_of(arguments.q_norm_weight);
  call.k_norm = bytes_of(arguments.k_norm_weight);
  if (problem.has(Feature::kAttentionBias)) {
    const std::int64_t plane = problem.bias_query_capacity * problem.bias_context_capacity;
    call.bias = bytes_of(arguments.attention_bias);
    call.bias_batch_stride = problem.bias_batch == 1 ? 0 : problem.bias_heads * plane;
    call.bias_head_stride = problem.bias_heads == 1 ? 0 : plane;
  }
  call.output = static_cast<std::byte*>(arguments.output.data);
  if (problem.qk_output != QkOutput::kNone) call.output_qk = static_cast<std::byte*>(arguments.output_qk.data);
  if (problem.has(Feature::kLse)) call.lse = static_cast<float*>(arguments.lse.data);
  return call;
}

namespace {

std::size_t workspace_bytes(const Problem& problem, int concurrency) {
  return schedule_workspace_bytes(problem, concurrency);
}

template <const Kernels& kKernels>
Status run(const Problem& problem, const Arguments& arguments, Workspace workspace, int concurrency,
           const RunContext& context) noexcept {
  run_schedule(kKernels, make_call(problem, arguments), workspace, concurrency, *context.executor);
  return {};
}

}  // namespace

#if defined(__x86_64__)
namespace {

// clang 14 does not know this one by name. Asked once: in a virtual machine the instruction leaves it, which takes 7
// us, and an engine plans every call whose lengths are new.
bool has_float16_conversion() {
  static const bool has = [] {
    unsigned a = 0;
    unsigned b = 0;
    unsigned c = 0;
    unsigned d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  }();
  return has;
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma") && has_float16_conversion();
}

std::string refuse_without_avx512(const Problem&) {
  return has_avx512() ? std::string() : "this processor lacks AVX-512 (F, BW, CD, DQ, VL)";
}

std::string refuse_without_vnni(const Problem&) {
  const bool has = has_avx512() && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
  return has ? std::string() : "this processor lacks AVX-512 (F, BW, CD, DQ, VL, VNNI, VBMI)";
}

std::string refuse_without_avx2(const Problem&) {
  const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_float16_conversion() &&
                   __builtin_cpu_supports("bmi2");
  return has ? std::string() : "this processor lacks AVX2, FMA, F16C or BMI2";
}

std::string refuse_without_baseline(const Problem&) {
  const bool has =
      __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul");
  return has ? std::string() : "this processor lacks SSE4.2, AES or PCLMUL";
}

}  // namespace

const dispatch::Backend kAvx512VnniBackend = {
    "cpu_avx512_vnni",      "Streaming attention in 512-bit vectors; int8 and int4 caches by integer products.",
    DeviceKind::kCpu,       kFeatures,
    refuse_without_vnni,    workspace_bytes,
    run<kAvx512VnniKernels>};

const dispatch::Backend kAvx512Backend = {"cpu_avx512",          "Streaming attention in 512-bit vectors.",
                                          DeviceKind::kCpu,      kFeatures,
                                          refuse_without_avx512, workspace_bytes,
                                          run<kAvx512Kernels>};

const dispatch::Backend kAvx2Backend = {"cpu_avx2",          "Streaming attention in 256-bit vectors.",
                                        DeviceKind::kCpu,    kFeatures,
                                        refuse_without_avx2, workspace_bytes,
                                        run<kAvx2Kernels>};
#else
namespace {
std::string refuse_without_baseline(const Problem&) {
  return {};
}
}  // namespace
#endif

const dispatch::Backend kBaselineBackend = {
    "cpu_baseline",          "Streaming attention in 128-bit vectors (SSE4.2 on x86-64, NEON on arm64).",
    DeviceKind::kCpu,        kFeatures,
    refuse_without_baseline, workspace_bytes,
    run<kBaselineKernels>};

}  // namespace octavo::cpu
