// The functions that are compiled once per instruction set (kernels.cc).
#pragma once

#include "cpu/tiles.h"

namespace octavo::cpu {

struct Kernels {
  // Prologue: normalises, rotates, encodes and stores K and V of tokens [begin, end) of the whole batch.
  void (*store_tokens)(const Call& call, std::int64_t begin, std::int64_t end, LaneScratch& scratch);

  // Fills scratch.query for the tile: normalised, rotated, times scale and K's quantisation scale.
  void (*load_queries)(const Call& call, const Tile& tile, LaneScratch& scratch);

  // Attention of the tile's rows over one chunk of keys, into `state` (overwritten). Writes output_qk's scores, if
  // asked for.
  void (*attend_chunk)(const Call& call, const Tile& tile, std::int64_t chunk, LaneScratch& scratch,
                       SoftmaxState& state);

  // Folds the next chunk's state into `into`.
  void (*fold)(const Call& call, const Tile& tile, const SoftmaxState& next, SoftmaxState& into);

  // Applies the sink and V's scale, writes output and lse, and output_qk's probabilities if asked for.
  void (*finish)(const Call& call, const Tile& tile, const SoftmaxState& state, LaneScratch& scratch);
};

#if defined(__x86_64__)
extern const Kernels kAvx512VnniKernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx2Kernels;
#endif
extern const Kernels kBaselineKernels;

}  // namespace octavo::cpu
