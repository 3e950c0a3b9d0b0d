// The CPU backends: one implementation, compiled for several instruction sets, each a backend of its own.
#pragma once

#include "dispatch/backend.h"

namespace octavo::cpu {

#if defined(__x86_64__)
extern const dispatch::Backend kAvx512VnniBackend;  // "cpu_avx512_vnni"
extern const dispatch::Backend kAvx512Backend;      // "cpu_avx512"
extern const dispatch::Backend kAvx2Backend;        // "cpu_avx2"
#endif
extern const dispatch::Backend kBaselineBackend;  // "cpu_baseline": SSE4.2 or NEON

}  // namespace octavo::cpu
