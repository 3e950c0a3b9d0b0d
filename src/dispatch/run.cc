#include <cstdint>
#include <exception>
#include <memory>
#include <new>

#include "contract/host_data.h"
#include "contract/match.h"
#include "contract/message.h"
#include "dispatch/backend.h"

namespace octavo {
namespace {

using contract::cat;

Status check_workspace(std::size_t needed, Workspace workspace) {
  if (needed == 0) return {};
  const auto address = reinterpret_cast<std::uintptr_t>(workspace.data);
  if (workspace.data == nullptr || workspace.bytes < needed) {
    return Status::invalid_argument(cat("workspace: must have the plan's ", needed, " bytes, got ",
                                        workspace.data == nullptr ? 0 : workspace.bytes,
                                        "; allocate Plan::workspace_bytes()"));
  }
  if (address % kWorkspaceAlignment == 0) return {};
  return Status::invalid_argument(cat("workspace: must be aligned to ", kWorkspaceAlignment,
                                      " bytes, got an address that is ", address % kWorkspaceAlignment,
                                      " past a multiple of it; allocate kWorkspaceAlignment more and take "
                                      "aligned_workspace()"));
}

struct AlignedDelete {
  void operator()(std::byte* data) const noexcept { ::operator delete (data, std::align_val_t{kWorkspaceAlignment}); }
};

}  // namespace

Workspace aligned_workspace(void* data, std::size_t bytes) noexcept {
  std::size_t space = bytes;
  if (data == nullptr || std::align(kWorkspaceAlignment, 0, data, space) == nullptr) return {};
  return {data, space};
}

Status check(const Plan& plan, const Arguments& arguments) noexcept {
  if (!plan.valid()) return Status::invalid_argument("plan: empty; call octavo::plan() and check its Status first");
  if (Status status = contract::check_match(plan.problem_, arguments); !status.ok()) return status;
  if (plan.backend_->device != DeviceKind::kCpu) return {};  // the host cannot read its values
  return contract::check_host_data(plan.problem_, arguments);
}

Status run(const Plan& plan, const Arguments& arguments, Workspace workspace, const RunContext& context) noexcept {
  if (Status status = check(plan, arguments); !status.ok()) return status;
  try {
    if (Status status = check_workspace(plan.workspace_bytes_, workspace); !status.ok()) return status;
  } catch (const std::exception&) {  // a message that could not be allocated
    return contract::out_of_memory();
  }
  RunContext resolved = context;
  if (resolved.executor == nullptr) resolved.executor = &default_executor();
  return plan.backend_->run(plan.problem_, arguments, workspace, plan.concurrency_, resolved);
}

Status paged_attention(const Arguments& arguments, const Attributes& attributes, const PlanOptions& options,
                       const RunContext& context) noexcept {
  if (options.device != DeviceKind::kCpu) {
    return Status::invalid_argument(
        "PlanOptions::device: paged_attention() allocates host memory and runs on the cpu only; call validate, plan "
        "and "
        "run with a workspace on the device");
  }
  Problem problem;
  if (Status status = validate(arguments, attributes, problem); !status.ok()) return status;
  PlanOptions sized = options;
  if (sized.concurrency == 0 && context.executor != nullptr) sized.concurrency = context.executor->concurrency();
  Plan plan;
  if (Status status = octavo::plan(problem, sized, plan); !status.ok()) return status;

  std::unique_ptr<std::byte, AlignedDelete> memory;
  if (plan.workspace_bytes() > 0) {
    memory.reset(static_cast<std::byte*>(
        ::operator new (plan.workspace_bytes(), std::align_val_t{kWorkspaceAlignment}, std::nothrow)));
    if (memory == nullptr) return contract::out_of_memory();
  }
  return run(plan, arguments, {memory.get(), plan.workspace_bytes()}, context);
}

const char* version() noexcept {
  return OCTAVO_VERSION;
}

}  // namespace octavo
