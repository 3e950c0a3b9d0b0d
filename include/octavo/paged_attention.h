// com.microsoft::PagedAttention for engines without a framework.
//
//   octavo::Arguments arguments;                // views of your buffers
//   octavo::Attributes attributes{.num_heads = 32, .kv_num_heads = 8};
//   octavo::Problem problem;
//   octavo::Plan plan;
//   octavo::Status status = octavo::validate(arguments, attributes, problem);
//   if (status.ok()) status = octavo::plan(problem, {}, plan);
//   std::vector<std::byte> workspace(plan.workspace_bytes() + octavo::kWorkspaceAlignment);
//   if (status.ok()) status = octavo::run(plan, arguments, octavo::aligned_workspace(workspace.data(),
//   workspace.size()), {});
//
// validate() checks the rules of docs/contract.md and touches no tensor data but attention_metadata. plan() chooses the
// backend; it may be kept for as long as the Problem stays the same. run() does the work: it neither allocates nor
// synchronises nor throws. All four are thread-safe; calls that write the same cache must be ordered by the caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "octavo/executor.h"
#include "octavo/problem.h"
#include "octavo/status.h"
#include "octavo/tensor_view.h"

namespace octavo {

namespace dispatch {
struct Backend;
}

// The operator's attributes, with the schema's defaults. num_heads and kv_num_heads have none.
struct Attributes {
  std::int64_t num_heads = 0;     // query heads
  std::int64_t kv_num_heads = 0;  // divides num_heads
  float scale = 0.0f;    // of q.k; 0 = 1/sqrt(head_size). Must be given when v_head_size differs from head_size
  float softcap = 0.0f;  // s -> softcap * tanh(s / softcap); 0 = off
  std::int64_t local_window_size = -1;  // positions seen, the current one included, to the left only; -1 = all
  std::int64_t is_causal = 1;           // 0: every query sees every position of its sequence
  std::int64_t do_rotary = 0;
  std::int64_t rotary_interleaved = 0;  // pairs (2i, 2i+1) instead of (i, i + rotary_dim/2)
  std::int64_t rotary_offset = 0;       // first rotated channel, a multiple of 8
  float qk_norm_epsilon = 1e-6f;
  QuantType k_quant_type = QuantType::kNone;
  QuantType v_quant_type = QuantType::kNone;
  CacheType k_cache_dtype = CacheType::kTensorType;
  CacheType v_cache_dtype = CacheType::kTensorType;
  CacheLayout kv_cache_layout = CacheLayout::kSeparate;
  std::int64_t v_head_size = 0;  // LATENT only: leading channels of the row that are V; 0 = head_size
  std::int64_t qk_output = 0;    // 1 = scores, 2 = probabilities
};

// The operator's tensors; docs/contract.md has the rules. T = query.type; H = head_size, N = num_heads, G =
// kv_num_heads.
struct Arguments {
  TensorView query;               // T (token_count, N*H), or packed (token_count, (N + 2G)*H) with key, value absent
  TensorView key;                 // T (token_count, G*H)
  TensorView value;               // T (token_count, G*H); absent in LATENT
  MutableTensorView key_cache;    // (num_blocks, block_size, G, H or (H+1)/2 bytes); updated in place
  MutableTensorView value_cache;  // as key_cache; absent in LATENT
  TensorView cumulative_sequence_length;  // int32 (batch_size + 1)
  TensorView past_seqlens;                // int32 (batch_size), tokens already in the cache
  TensorView block_table;                 // int32 or int64 (batch_size, max_blocks_per_sequence); -1 = unmapped
  TensorView cos_cache;                   // T (max_seq_len, rotary_dim/2)
  TensorView sin_cache;                   // T (max_seq_len, rotary_dim/2)
  TensorView slot_mapping;                // as block_table (token_count); block*block_size + offset; -1 = do not write
  TensorView head_sink;                   // T (N)
  TensorView q_norm_weight;               // T (H)
  TensorView k_norm_weight;               // T (H)
  TensorView k_scale;                     // float32 (1) or (G, 1, H)
  TensorView v_scale;                     // float32 (1) or (G, 1, H)
  TensorView attention_metadata;          // int32 (2) or (3), in host memory: bounds of query length and KV length
  TensorView query_positions;             // int32 (token_count)
  TensorView attention_bias;              // T (batch_size or 1, N or 1, query capacity, context capacity)

  MutableTensorView output;  // T (token_count, N*effective_v_head_size)
  MutableTensorView
      output_qk;          // float32, float16 or bfloat16 (N, token_count, Problem::max_context_len); iff qk_output != 0
  MutableTensorView lse;  // optional float32 (N, token_count): log-sum-exp of the attended scores, natural log, no
                          // sink; -inf for a row that attends to nothing
};

enum class DeviceKind : std::uint8_t { kCpu, kCuda };
const char* name(DeviceKind kind) noexcept;

struct PlanOptions {
  DeviceKind device = DeviceKind::kCpu;
  int device_ordinal = 0;    // which CUDA device; it must be the current one of the thread that calls run()
  int concurrency = 0;       // of the executor that run() will get; 0 = default_executor()'s
  std::string_view backend;  // for tests: take the backend of this name or fail; empty = choose
  std::int64_t output_qk_limit_bytes = std::int64_t{1} << 30;  // refuse a larger output_qk (kResourceExhausted)
};

// One backend's answer to a Problem.
struct Verdict {
  std::string backend;      // e.g. "cpu_avx512"
  std::string description;  // one sentence about the backend
  std::string refusal;      // empty: it accepts
};

// The decision for one Problem. Copyable, small, immutable.
class Plan {
 public:
  Plan() noexcept = default;
  bool valid() const noexcept { return backend_ != nullptr; }
  const Problem& problem() const noexcept { return problem_; }
  std::string_view backend_name() const noexcept;
  std::size_t workspace_bytes() const noexcept { return workspace_bytes_; }
  int concurrency() const noexcept { return concurrency_; }

 private:
  friend Status plan(const Problem&, const PlanOptions&, Plan&) noexcept;
  friend Status check(const Plan&, const Arguments&) noexcept;
  friend Status run(const Plan&, const Arguments&, struct Workspace, const struct RunContext&) noexcept;
  Problem problem_;
  const dispatch::Backend* backend_ = nullptr;
  std::size_t workspace_bytes_ = 0;
  int concurrency_ = 1;
};

inline constexpr std::size_t kWorkspaceAlignment = 64;

// Scratch memory of one run(): aligned to kWorkspaceAlignment, at least Plan::workspace_bytes(), not shared by
// concurrent runs.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

// The largest aligned part of [data, data + bytes).
Workspace aligned_workspace(void* data, std::size_t bytes) noexcept;

struct RunContext {
  Executor* executor = nullptr;  // CPU; nullptr = default_executor()
  void* stream = nullptr;        // CUDA: the cudaStream_t that all work is put on; nullptr = the default stream
};

// The rules of docs/contract.md that concern the attributes alone, for callers that know them before any tensor.
// Errors: kInvalidArgument.
Status validate_attributes(const Attributes& attributes) noexcept;

// Checks every rule that needs no data (docs/contract.md) and reduces the call to a Problem.
// Errors: kInvalidArgument.
Status validate(const Arguments& arguments, const Attributes& attributes, Problem& problem) noexcept;

// Chooses the backend and sizes the workspace. Depends on nothing but its inputs and the processor (and, with
// concurrency 0, on default_executor()). Errors: kUnsupported (with each backend's reason), kResourceExhausted
// (output_qk), kInvalidArgument (unknown backend name).
Status plan(const Problem& problem, const PlanOptions& options, Plan& plan) noexcept;

// What each backend of `options.device` says to `problem`, in order of preference: the first that accepts is taken.
std::vector<Verdict> explain(const Problem& problem, const PlanOptions& options = {});

// What run() checks before it writes anything: that `arguments` still fit the plan, and on a CPU every length, id and
// slot. For callers who prepare memory (copy a cache, say) between the checks and run(). Errors: kInvalidArgument
// (naming the input, the index and the value).
Status check(const Plan& plan, const Arguments& arguments) noexcept;

// Appends the new tokens' K and V to the caches and computes attention. `arguments` must be what validate() saw, up to
// the data pointers and values. On a CPU, lengths, ids and slots are checked first, and an error leaves everything
// unwritten. Errors: kInvalidArgument (naming the input, the index and the value), kInternal.
Status run(const Plan& plan, const Arguments& arguments, Workspace workspace, const RunContext& context) noexcept;

// validate, plan, allocate, run: for tests and scripts.
Status paged_attention(const Arguments& arguments, const Attributes& attributes, const PlanOptions& options = {},
                       const RunContext& context = {}) noexcept;

const char* version() noexcept;  // "0.1.0"

}  // namespace octavo
