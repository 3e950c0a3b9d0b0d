// Shares one call out among lanes. The split changes speed only: a row's arithmetic is fixed by kTileKeys and
// kChunkKeys.
#pragma once

#include "cpu/kernels.h"

namespace octavo::cpu {

// Bytes of workspace for any lengths that the Problem admits; grows with tokens and batch, not with context.
std::size_t schedule_workspace_bytes(const Problem& problem, int lanes) noexcept;

// Appends K and V, attends, writes every output. `call` has passed contract::check_host_data.
void run_schedule(const Kernels& kernels, const Call& call, Workspace workspace, int lanes,
                  Executor& executor) noexcept;

}  // namespace octavo::cpu
