// The general attention of a call whose schedule and prologue have been launched: what the general backend runs, and
// what faster ones run for the sequences that they leave.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "cuda/call.h"
#include "cuda/general/tuning.h"
#include "cuda/runtime.h"

namespace octavo::cuda {

// Why no grid can hold the call; empty if one can.
std::string refuse_grid(const Problem& problem);

// Why blocks or grids of this device cannot hold the call; empty if they can.
std::string refuse_size(const Problem& problem, const DeviceFacts& facts);

// The attention kernel and, where keys of a row are shared out, the merge kernel. `call.scratch.tile_rows` is the
// instance's.
Status launch_general_attention(const Problem& problem, const Call& call, const Instance& instance,
                                const DeviceFacts& facts, cudaStream_t stream) noexcept;

}  // namespace octavo::cuda
