#include <algorithm>
#include <exception>

#include "contract/message.h"
#include "dispatch/choose.h"

namespace octavo {
namespace {

// No processor has more; beyond, sizes of workspaces would not fit 64 bits.
constexpr int kMaxConcurrency = 4096;

}  // namespace

const char* name(DeviceKind kind) noexcept {
  switch (kind) {
    case DeviceKind::kCpu: return "cpu";
    case DeviceKind::kCuda: return "cuda";
  }
  return "unknown";
}

std::string_view Plan::backend_name() const noexcept {
  return valid() ? backend_->name : std::string_view();
}

Status plan(const Problem& problem, const PlanOptions& options, Plan& plan) noexcept {
  try {
    if (options.concurrency < 0) {
      return Status::invalid_argument(contract::cat("PlanOptions::concurrency: must not be negative, got ",
                                                    options.concurrency, "; 0 takes the default executor's"));
    }
    const dispatch::Backend* backend = nullptr;
    if (Status status = dispatch::choose(problem, options, dispatch::backends(), backend); !status.ok()) return status;
    if (Status status = dispatch::check_output_qk_size(problem, options.output_qk_limit_bytes); !status.ok()) {
      return status;
    }
    plan.problem_ = problem;
    plan.backend_ = backend;
    plan.concurrency_ =
        std::min(options.concurrency > 0 ? options.concurrency : default_executor().concurrency(), kMaxConcurrency);
    plan.workspace_bytes_ = backend->workspace_bytes(problem, plan.concurrency_);
    return {};
  } catch (const std::exception&) {  // a message that could not be allocated
    return contract::out_of_memory();
  }
}

std::vector<Verdict> explain(const Problem& problem, const PlanOptions& options) {
  return dispatch::judge(problem, options.device, dispatch::backends(), options.device_ordinal);
}

}  // namespace octavo
