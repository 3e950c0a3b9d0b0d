#include "dispatch/choose.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "contract/message.h"

namespace octavo::dispatch {
namespace {

using contract::cat;

// "cpu_avx2, cpu_baseline"
std::string names(DeviceKind device, Backends candidates) {
  std::string text;
  for (const Backend* backend : candidates) {
    if (backend->device != device) continue;
    if (!text.empty()) text += ", ";
    text += backend->name;
  }
  return text;
}

// How to come by a backend for a device for which this build has none.
const char* remedy(DeviceKind device) {
  switch (device) {
    case DeviceKind::kCpu: break;  // every build has one
    case DeviceKind::kCuda: return "build octavo with -DOCTAVO_CUDA=ON, or plan for the cpu";
  }
  return "add one to src/backends.cc";
}

// a * b for a, b >= 0, or the largest number where that overflows.
std::int64_t saturating_product(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<std::int64_t>::max() : product;
}

}  // namespace

std::string refusal(const Backend& backend, const Problem& problem, int device_ordinal) {
  const FeatureSet missing = problem.features.without(backend.features);
  if (!missing.empty()) return "does not support " + to_string(missing);
  std::string reason = backend.refuse(problem);
  if (reason.empty() && backend.refuse_device != nullptr) reason = backend.refuse_device(problem, device_ordinal);
  return reason;
}

std::vector<Verdict> judge(const Problem& problem, DeviceKind device, Backends candidates, int device_ordinal) {
  std::vector<Verdict> verdicts;
  for (const Backend* backend : candidates) {
    if (backend->device == device)
      verdicts.push_back({backend->name, backend->description, refusal(*backend, problem, device_ordinal)});
  }
  return verdicts;
}

Status choose(const Problem& problem, const PlanOptions& options, Backends candidates, const Backend*& chosen) {
  const bool none = std::none_of(candidates.begin(), candidates.end(),
                                 [&options](const Backend* backend) { return backend->device == options.device; });
  if (none) {
    return {StatusCode::kUnsupported, cat("PlanOptions::device: this build of octavo has no backend for the ",
                                          name(options.device), "; ", remedy(options.device))};
  }
  bool known = options.backend.empty();
  std::string refusals;
  for (const Backend* backend : candidates) {
    if (backend->device != options.device) continue;
    if (!options.backend.empty() && options.backend != backend->name) continue;
    known = true;
    const std::string reason = refusal(*backend, problem, options.device_ordinal);
    if (reason.empty()) {
      chosen = backend;
      return {};
    }
    if (!refusals.empty()) refusals += "; ";
    refusals += cat(backend->name, ": ", reason);
  }
  if (!known) {
    return Status::invalid_argument(cat("PlanOptions::backend: must name a backend for the ", name(options.device),
                                        " or be empty, got '", options.backend, "'; this build has ",
                                        names(options.device, candidates)));
  }
  return {StatusCode::kUnsupported,
          cat("no backend for the ", name(options.device), " takes this call (", refusals,
              "); the call is legal, drop one of the features named or build octavo with a backend that has them")};
}

Status check_output_qk_size(const Problem& problem, std::int64_t limit_bytes) {
  if (problem.qk_output == QkOutput::kNone) return {};
  const std::int64_t bytes = saturating_product(
      saturating_product(problem.num_heads, problem.token_count),
      saturating_product(problem.max_context_len, static_cast<std::int64_t>(size_in_bytes(problem.output_qk_type))));
  if (bytes <= limit_bytes) return {};
  return {
      StatusCode::kResourceExhausted,
      cat("output_qk: at most ", limit_bytes, " bytes, got ", bytes, " (", problem.num_heads, " heads * ",
          problem.token_count, " tokens * ", problem.max_context_len, " positions of ", name(problem.output_qk_type),
          "); raise PlanOptions::output_qk_limit_bytes, pass attention_metadata with a smaller bound of the KV "
          "length, or feed fewer tokens a call")};
}

}  // namespace octavo::dispatch
