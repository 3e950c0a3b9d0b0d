// The ring of tiles in shared memory between the warps that copy and the warps that work: K and V of a tile have a
// slot each, in turn.
#pragma once

#include <cstdint>

#include "cuda/decode/shape.h"
#include "cuda/device/barrier.cuh"
#include "cuda/device/tensor_copy.cuh"
#include "cuda/device/tensor_core.cuh"

namespace octavo::cuda::decode {

// One side's view of it: the slot that comes next.
template <typename S>
class Ring {
 public:
  __device__ Ring(const Layout& layout, std::byte* shared)
      : slots_(shared_address(shared + layout.ring)),
        full_(shared_address(shared + layout.full)),
        empty_(shared_address(shared + layout.empty)),
        notes_(reinterpret_cast<TileNote*>(shared + layout.notes)) {}

  // By one thread, before a barrier of the block. Lane 0 of a copying warp arrives for the note and the copy engine's
  // bytes; without the copy engine every lane arrives once more, for its own copies.
  __device__ void init(bool boxes) const {
    for (int i = 0; i < S::kSlots; ++i) {
      init_barrier(full_ + i * 8, boxes ? 1 : 33);
      init_barrier(empty_ + i * 8, S::kWarps);
    }
    publish_barriers();
  }

  __device__ std::uint32_t slot() const { return slots_ + index_ * S::kSlotBytes; }
  __device__ std::uint32_t full_barrier() const { return full_ + index_ * 8; }
  __device__ TileNote& note() const { return notes_[index_]; }

  __device__ void wait_full() const { wait_for_phase(full_ + index_ * 8, parity_); }
  __device__ void wait_empty() const { wait_for_phase(empty_ + index_ * 8, parity_ ^ 1u); }

  // By one lane of each working warp. `loaded`: words of the last loads from the slot and its note, and no bits. The
  // arrival must not overtake loads that have been issued and have not returned, and nothing but their data holds it
  // back.
  __device__ void release(std::uint32_t loaded) const { arrive(empty_ + index_ * 8 + loaded); }

  __device__ void advance() {
    if (++index_ == S::kSlots) {
      index_ = 0;
      parity_ ^= 1u;
    }
  }

 private:
  const std::uint32_t slots_, full_, empty_;
  TileNote* const notes_;
  std::uint32_t index_ = 0, parity_ = 0;
};

}  // namespace octavo::cuda::decode
