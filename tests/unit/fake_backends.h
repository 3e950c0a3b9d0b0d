// Backends that compute nothing and remember what they were given.
#pragma once

#include "dispatch/backend.h"

namespace octavo::test {

// "fake_window": supports only local_window; "fake_wide": every feature but output_qk, head_size 16 and up; "fake_any":
// everything.
extern const dispatch::Backend kFakeWindow, kFakeWide, kFakeAny;

struct RunRecord {
  int runs = 0;
  Workspace workspace;
  int concurrency = 0;
  const Executor* executor = nullptr;
};
RunRecord& run_record() noexcept;

}  // namespace octavo::test
