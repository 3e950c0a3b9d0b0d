// The CUDA backends, in order of preference.
#pragma once

#include "dispatch/backend.h"

namespace octavo::cuda {

extern const dispatch::Backend kDecodeBackend;   // "cuda_decode": few new tokens a sequence
extern const dispatch::Backend kGeneralBackend;  // "cuda_general": the whole contract

}  // namespace octavo::cuda
