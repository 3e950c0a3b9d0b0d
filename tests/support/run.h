// Running a Call on a backend, with a guarded workspace that holds NaN.
#pragma once

#include <string>
#include <vector>

#include "octavo/paged_attention.h"
#include "support/call.h"

namespace octavo::testing {

struct RunSettings {
  std::string backend = {};      // empty: the one that plan() chooses
  Executor* executor = nullptr;  // nullptr: serial_executor()
};

// validate, plan, run. Overrunning the workspace is an error of code kInternal.
Status run(const Call& call, const RunSettings& settings = {});

// The backends of this build that accept `call`, and those that refuse with their reasons ("name: reason").
struct Acceptance {
  Status status;  // of validate()
  std::vector<std::string> accepting;
  std::vector<std::string> refusals;
};
Acceptance ask_backends(const Call& call);

}  // namespace octavo::testing
