// The choice of the backend: one function decides, and plan(), explain() and the tests all ask it.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "dispatch/backend.h"

namespace octavo::dispatch {

using Backends = std::span<const Backend* const>;

// Why `backend` does not take `problem` on the device of this ordinal; empty if it does.
std::string refusal(const Backend& backend, const Problem& problem, int device_ordinal = 0);

// What each of `candidates` for `device` says, in their order.
std::vector<Verdict> judge(const Problem& problem, DeviceKind device, Backends candidates, int device_ordinal = 0);

// The first of `candidates` for options.device that accepts; with options.backend, that one or none.
// Errors: kUnsupported (each refusal), kInvalidArgument (options.backend names none of the device's).
Status choose(const Problem& problem, const PlanOptions& options, Backends candidates, const Backend*& chosen);

// Refuses an output_qk above `limit_bytes` (kResourceExhausted): it grows with tokens times context.
Status check_output_qk_size(const Problem& problem, std::int64_t limit_bytes);

}  // namespace octavo::dispatch
