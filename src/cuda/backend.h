// The CUDA backends, in order of preference.
#pragma once

#include "dispatch/backend.h"

namespace octavo::cuda {

extern const dispatch::Backend kGeneralBackend;  // "cuda_general": the whole contract

}  // namespace octavo::cuda
