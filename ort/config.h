// Settings that a session gives to the library: session config entries, read when the library is registered.
//
//   octavo.backend                 backend name to force (for tests), as octavo::explain() prints it
//   octavo.output_qk_limit_bytes   largest output_qk that is computed; default 1 GiB
//   octavo.concurrency             tasks planned for on a CPU; default: the processors of this machine. ONNX Runtime
//                                  does not tell an operator how many threads its pool has. Speed and workspace depend
//                                  on it, results do not.
//   octavo.explain                 "1" logs, as a warning, which backend a node takes whenever that changes. Left out,
//                                  the environment variable decides by which ONNX Runtime's own attention kernels
//                                  report their choice, ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO
#pragma once

#include <cstdint>
#include <string>

#include "octavo/status.h"
#include "ort/api.h"

namespace octavo::ort {

struct Config {
  std::string backend;
  std::int64_t output_qk_limit_bytes = std::int64_t{1} << 30;
  int concurrency = 1;
  bool explain = false;
  bool operator==(const Config&) const = default;
};

// Errors: kInvalidArgument, naming the entry, what it may hold and what it held.
Status read_config(const OrtApi& api, const OrtSessionOptions* options, Config& config);

}  // namespace octavo::ort
