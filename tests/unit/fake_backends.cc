#include "fake_backends.h"

#include <array>

namespace octavo {
namespace test {
namespace {

std::string accept(const Problem&) {
  return {};
}

std::string refuse_narrow(const Problem& problem) {
  return problem.head_size < 16 ? "head_size must be at least 16" : std::string();
}

std::size_t bytes_per_task(const Problem&, int concurrency) {
  return 128 * static_cast<std::size_t>(concurrency);
}

Status record_run(const Problem&, const Arguments&, Workspace workspace, int concurrency,
                  const RunContext& context) noexcept {
  RunRecord& record = run_record();
  record = {record.runs + 1, workspace, concurrency, context.executor};
  return {};
}

}  // namespace

const dispatch::Backend kFakeWindow{"fake_window", "Windows only.", DeviceKind::kCpu, Feature::kLocalWindow,
                                    accept,        bytes_per_task,  record_run};
const dispatch::Backend kFakeWide{
    "fake_wide",   "Wide heads.",  DeviceKind::kCpu, FeatureSet::all().without(Feature::kOutputQk),
    refuse_narrow, bytes_per_task, record_run};
const dispatch::Backend kFakeAny{"fake_any", "Everything.",  DeviceKind::kCpu, FeatureSet::all(),
                                 accept,     bytes_per_task, record_run};

RunRecord& run_record() noexcept {
  static RunRecord record;
  return record;
}

}  // namespace test

namespace dispatch {

std::span<const Backend* const> backends() noexcept {
  static constexpr std::array<const Backend*, 3> kList{&test::kFakeWindow, &test::kFakeWide, &test::kFakeAny};
  return kList;
}

}  // namespace dispatch
}  // namespace octavo
