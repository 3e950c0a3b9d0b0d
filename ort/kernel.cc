#include "ort/kernel.h"

#include <algorithm>
#include <array>
#include <limits>

#include "ort/tensors.h"

namespace octavo::ort {
namespace {

// Where each input goes. The caches are not here: they are mutable.
constexpr std::array<TensorView Arguments::*, kInputCount> kReadOnlyInputs = {
    &Arguments::query,
    &Arguments::key,
    &Arguments::value,
    nullptr,
    nullptr,
    &Arguments::cumulative_sequence_length,
    &Arguments::past_seqlens,
    &Arguments::block_table,
    &Arguments::cos_cache,
    &Arguments::sin_cache,
    &Arguments::slot_mapping,
    &Arguments::head_sink,
    &Arguments::q_norm_weight,
    &Arguments::k_norm_weight,
    &Arguments::k_scale,
    &Arguments::v_scale,
    &Arguments::attention_metadata,
    &Arguments::query_positions,
    &Arguments::attention_bias,
};

std::int64_t extent(const TensorView& view, std::size_t axis) noexcept {
  return static_cast<int>(axis) < view.rank && axis < view.shape.size() ? view.shape[axis] : 0;
}

// a * b, 0 where that is no possible extent: validation has a rule for whatever input is to blame.
std::int64_t extent_product(std::int64_t a, std::int64_t b) noexcept {
  if (a <= 0 || b <= 0 || a > std::numeric_limits<std::int64_t>::max() / b) return 0;
  return a * b;
}

std::size_t byte_count(const MutableTensorView& view) noexcept {
  return static_cast<std::size_t>(view.element_count()) * size_in_bytes(view.type);
}

// plan() names its options; a session sets them under other names.
Status in_words_of_a_session(Status status) {
  const char* entry = status.code() == StatusCode::kResourceExhausted ? "octavo.output_qk_limit_bytes"
                      : status.code() == StatusCode::kInvalidArgument ? "octavo.backend"
                                                                      : nullptr;
  if (entry == nullptr) return status;
  return {status.code(), status.message() + " (PlanOptions are session config entries here: " + entry + ")"};
}

}  // namespace

Status Kernel::create(const OrtApi& api, const Config& config, MakeDevice make_device, const OrtKernelInfo* info,
                      std::unique_ptr<Kernel>& kernel) {
  std::unique_ptr<Kernel> created(new Kernel(api, config));
  Status status = read_attributes(api, info, created->attributes_);
  if (status.ok()) status = validate_attributes(created->attributes_);
  if (status.ok()) status = read_outputs(api, info, created->attributes_, created->outputs_);
  if (!status.ok()) return status;
  created->node_name_ = node_name(api, info);
  status = make_device(api, info, created->device_);
  if (status.ok()) kernel = std::move(created);
  return status;
}

Status Kernel::compute(OrtKernelContext* context) {
  Arguments arguments;
  Status status = read_inputs(context, arguments);
  if (!status.ok()) return status;
  shape_outputs(arguments);

  Problem problem;
  status = validate(arguments, attributes_, problem);
  if (!status.ok()) return status;
  std::shared_ptr<const Plan> plan;
  status = plan_for(problem, context, plan);
  if (!status.ok()) return status;
  const CacheInputs cache_inputs{arguments.key_cache.data, arguments.value_cache.data};
  status = bind_outputs(context, arguments);
  if (!status.ok()) return status;

  std::vector<CacheCopy> copies;
  status = find_copies(*plan, arguments, cache_inputs, copies);
  if (!status.ok()) return status;
  return device_->run(context, *plan, arguments, copies);
}

Status Kernel::read_inputs(const OrtKernelContext* context, Arguments& arguments) const {
  for (std::size_t index = 0; index < kInputCount; ++index) {
    MutableTensorView view;
    Status status = input_view(api_, context, index, view);
    if (!status.ok()) return status;
    if (index == kKeyCache) {
      arguments.key_cache = view;
    } else if (index == kValueCache) {
      arguments.value_cache = view;
    } else {
      arguments.*kReadOnlyInputs[index] = view;
    }
  }
  // Engines that always feed the input say "no bounds" with an empty tensor.
  if (arguments.attention_metadata.rank == 1 && arguments.attention_metadata.shape[0] == 0) {
    arguments.attention_metadata = TensorView();
  }
  return {};
}

// ONNX Runtime wants the shapes of the outputs from the operator; the contract derives them from the inputs. Malformed
// inputs give extents of 0 here: validate() refuses them by name before it looks at the outputs. The attributes keep
// their rules since create().
void Kernel::shape_outputs(Arguments& arguments) const {
  // validate() wants to see that a tensor has memory; there is none before it has agreed to the shapes.
  alignas(kWorkspaceAlignment) static std::byte not_yet_allocated;

  const Attributes& a = attributes_;
  const std::int64_t token_count = extent(arguments.query, 0);
  std::int64_t width = extent(arguments.query, 1);
  if (a.kv_cache_layout == CacheLayout::kLatent) {
    if (a.v_head_size != 0) width = extent_product(a.num_heads, a.v_head_size);
  } else if (!arguments.key.present() && !arguments.value.present()) {
    width = width / (a.num_heads + 2 * a.kv_num_heads) * a.num_heads;
  }
  arguments.output = MutableTensorView(&not_yet_allocated, arguments.query.type, {token_count, width});

  if (!outputs_.output_qk) return;
  std::int64_t context_len = extent_product(extent(arguments.block_table, 1), extent(arguments.key_cache, 1));
  const TensorView& metadata = arguments.attention_metadata;
  if (metadata.type == ElementType::kInt32 && metadata.rank == 1 && metadata.shape[0] >= 2) {
    const std::int64_t bound = static_cast<const std::int32_t*>(metadata.data)[1];
    if (bound > 0) context_len = std::min(context_len, bound);
  }
  arguments.output_qk =
      MutableTensorView(&not_yet_allocated, outputs_.output_qk_type, {a.num_heads, token_count, context_len});
}

PlanOptions Kernel::plan_options() const noexcept {
  PlanOptions options;
  options.concurrency = config_.concurrency;
  options.output_qk_limit_bytes = config_.output_qk_limit_bytes;
  device_->place(options);
  return options;
}

Status Kernel::plan_for(const Problem& problem, const OrtKernelContext* context, std::shared_ptr<const Plan>& plan) {
  std::shared_ptr<const Plan> latest = latest_plan_.load(std::memory_order_acquire);
  if (latest != nullptr && latest->problem() == problem) {
    plan = std::move(latest);
    return {};
  }
  PlanOptions options = plan_options();
  options.backend = config_.backend;
  auto made = std::make_shared<Plan>();
  if (Status status = octavo::plan(problem, options, *made); !status.ok())
    return in_words_of_a_session(std::move(status));
  if (config_.explain && (latest == nullptr || latest->backend_name() != made->backend_name()))
    explain_choice(*made, context);
  plan = std::move(made);
  latest_plan_.store(plan, std::memory_order_release);
  return {};
}

void Kernel::explain_choice(const Plan& plan, const OrtKernelContext* context) const {
  std::string text = "octavo: node \"" + node_name_ + "\" takes backend " + std::string(plan.backend_name()) +
                     " for features " + to_string(plan.problem().features);
  for (const Verdict& verdict : explain(plan.problem(), plan_options())) {
    if (!verdict.refusal.empty()) text += "; " + verdict.backend + " refuses: " + verdict.refusal;
  }
  const OrtLogger* logger = nullptr;
  if (!succeeded(api_, api_.KernelContext_GetLogger(context, &logger))) return;
  static_cast<void>(succeeded(api_, api_.Logger_LogMessage(logger, ORT_LOGGING_LEVEL_WARNING, text.c_str(),
                                                           __FILE_NAME__, __LINE__, __func__)));
}

// Points the outputs, and the caches where the node has outputs for them, at the memory that the session bound.
Status Kernel::bind_outputs(OrtKernelContext* context, Arguments& arguments) const {
  Status status = allocate_output(api_, context, kOutput, arguments.output);
  if (status.ok() && outputs_.output_qk) status = allocate_output(api_, context, kOutputQk, arguments.output_qk);
  if (!outputs_.cache_outputs) return status;
  if (status.ok()) status = allocate_output(api_, context, kKeyCacheOut, arguments.key_cache);
  if (status.ok() && arguments.value_cache.present()) {
    status = allocate_output(api_, context, kValueCacheOut, arguments.value_cache);
  }
  return status;
}

// A cache output in its input's buffer is updated in place. One that lies elsewhere gets the old contents first, and
// the input stays as it is. Nothing is copied for a call that run() would refuse.
Status Kernel::find_copies(const Plan& plan, const Arguments& arguments, const CacheInputs& inputs,
                           std::vector<CacheCopy>& copies) const {
  const std::size_t key_bytes = arguments.key_cache.data == inputs.key ? 0 : byte_count(arguments.key_cache);
  const std::size_t value_bytes = arguments.value_cache.data == inputs.value ? 0 : byte_count(arguments.value_cache);
  if (key_bytes == 0 && value_bytes == 0) return {};
  if (key_bytes != 0 && arguments.key_cache.data == inputs.value) {
    return Status::invalid_argument(
        "key_cache_out: must not be bound to the buffer of value_cache, got its address; bind it to key_cache's buffer "
        "or to one of its own");
  }
  if (value_bytes != 0 && arguments.value_cache.data == inputs.key) {
    return Status::invalid_argument(
        "value_cache_out: must not be bound to the buffer of key_cache, got its address; bind it to value_cache's "
        "buffer or to one of its own");
  }
  if (Status status = check(plan, arguments); !status.ok()) return status;
  if (key_bytes != 0) copies.push_back({arguments.key_cache.data, inputs.key, key_bytes});
  if (value_bytes != 0) copies.push_back({arguments.value_cache.data, inputs.value, value_bytes});
  return {};
}

}  // namespace octavo::ort
