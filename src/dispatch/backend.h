// The interface between the choice of a backend and the backends themselves.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "octavo/paged_attention.h"

namespace octavo::dispatch {

// One way to compute a Problem on one kind of device. A constant object per backend; src/backends.cc lists them all.
struct Backend {
  const char* name;         // "cpu_avx512": what explain() prints and PlanOptions::backend takes
  const char* description;  // one sentence
  DeviceKind device;
  FeatureSet features;  // what it supports; the choice refuses the rest by name

  // Reasons beyond features: the processor, sizes, type combinations. Empty = accepts. One sentence otherwise.
  std::string (*refuse)(const Problem& problem);

  // Bytes of workspace for any lengths that the Problem admits.
  std::size_t (*workspace_bytes)(const Problem& problem, int concurrency);

  Status (*run)(const Problem& problem, const Arguments& arguments, Workspace workspace, int concurrency,
                const RunContext& context) noexcept;

  // As `refuse`, for what depends on the device of this ordinal: driver, compute capability. nullptr: nothing does.
  std::string (*refuse_device)(const Problem& problem, int device_ordinal) = nullptr;
};

// All backends of this build in order of preference (src/backends.cc).
std::span<const Backend* const> backends() noexcept;

}  // namespace octavo::dispatch
