#include "support/run.h"

#include <cstring>

#include "support/guarded_buffer.h"

namespace octavo::testing {

Status run(const Call& call, const RunSettings& settings) {
  Executor& executor = settings.executor != nullptr ? *settings.executor : serial_executor();
  Problem problem;
  Status status = validate(call.arguments, call.attributes, problem);
  if (!status.ok()) return status;
  PlanOptions options;
  options.backend = settings.backend;
  options.concurrency = executor.concurrency();
  Plan decision;
  status = plan(problem, options, decision);
  if (!status.ok()) return status;
  GuardedBuffer workspace(decision.workspace_bytes(), kWorkspaceAlignment);
  std::memset(workspace.data(), 0xFF, workspace.size());
  RunContext context;
  context.executor = &executor;
  status = octavo::run(decision, call.arguments, Workspace{workspace.data(), workspace.size()}, context);
  if (!workspace.intact()) return {StatusCode::kInternal, "the workspace was overrun"};
  return status;
}

Acceptance ask_backends(const Call& call) {
  Acceptance acceptance;
  Problem problem;
  acceptance.status = validate(call.arguments, call.attributes, problem);
  if (!acceptance.status.ok()) return acceptance;
  for (const Verdict& verdict : explain(problem)) {
    if (verdict.refusal.empty()) {
      acceptance.accepting.push_back(verdict.backend);
    } else {
      acceptance.refusals.push_back(verdict.backend + ": " + verdict.refusal);
    }
  }
  return acceptance;
}

}  // namespace octavo::testing
