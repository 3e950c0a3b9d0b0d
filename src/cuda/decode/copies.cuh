// The two warps that copy K and V of a block's units into the ring.
#pragma once

#include <cstdint>

#include "cuda/decode/ring.cuh"
#include "cuda/decode/shape.h"
#include "cuda/decode/shared_rows.cuh"
#include "cuda/decode/units.cuh"

namespace octavo::cuda::decode {

// One class for both, whose code is fetched once.
template <typename S>
class Copies {
 public:
  __device__ Copies(const Call& call, const Work& work, const CUtensorMap* map, const Layout& layout, std::byte* shared,
                    bool of_values)
      : call_(call),
        work_(work),
        map_(map),
        ring_(layout, shared),
        shared_(shared),
        of_values_(of_values),
        lane_(static_cast<int>(threadIdx.x) % 32),
        policy_(read_once_policy()) {
    if (of_values) ring_.advance();  // K's slots and V's take turns
    if (uses_boxes() && lane_ == 0) prefetch_map(map);
  }

  __device__ bool of_values() const { return of_values_; }

  // A unit to send. Reads the first entries of the block table.
  __device__ void start(const Unit& unit, std::int32_t index) {
    unit_ = unit;
    index_ = index;
    seen_from_ = keys_seen(call_, work_, unit.span.past, unit.span.kv_length()).begin;
    first_head_ = unit.head_group * S::kHeads;
    heads_ = min(S::kHeads, call_.kv_num_heads - first_head_);
    table_row_ = static_cast<const std::byte*>(call_.block_table.data) +
                 unit.sequence * call_.table_columns * (call_.block_table.wide ? 8 : 4);
    if (few_boxes()) [[likely]] {
      entry_[0] = fetch_box_entry(unit.begin);
    } else {
      fetch_entries(unit.begin);
    }
  }

  // All its tiles, with its number.
  __device__ void send() {
    if (few_boxes()) [[likely]] {
      send_boxes();
      return;
    }
#pragma unroll 1
    for (std::int32_t base = unit_.begin; base < unit_.end; base += S::kTileKeys) {
      look_up(base);
      fetch_entries(base + S::kTileKeys);
      announce();
      start_copies(base);
      step();
    }
  }

  // No unit follows: in place of K.
  __device__ void send_end() {
    if (of_values_) return;
    ring_.wait_empty();
    if (lane_ == 0) ring_.note().unit = -1;
    if (!uses_boxes()) arrive(ring_.full_barrier());
    if (lane_ == 0) arrive(ring_.full_barrier());
  }

 private:
  static constexpr int kPieces = S::kRowBytes / 16;
  static_assert(kPieces <= 32);
  static constexpr int kLookups = S::kTileKeys / 32;

  __device__ bool uses_boxes() const {
    return kHasTensorCopies && work_.boxes;
  }

  // Past 2^31 a key is past every end.
  __device__ std::uint32_t key_of_lookup(std::int32_t base, int i) const {
    return static_cast<std::uint32_t>(base) + static_cast<std::uint32_t>(i * 32 + lane_);
  }
  // A key that some row may see, or with one among the next ones.
  __device__ bool is_wanted(std::uint32_t key, std::uint32_t more) const {
    return key < static_cast<std::uint32_t>(unit_.end) && key + more >= static_cast<std::uint32_t>(seen_from_);
  }

  // Starts to read the block-table entry of a key; none if no row sees it or one of the next `more`.
  __device__ std::uint32_t fetch_entry(std::uint32_t key, std::uint32_t more) const {
    if (!is_wanted(key, more)) return kNoBlock;
    const std::uint32_t column = column_of(key);
    if (!call_.block_table.wide) [[likely]]
      return __ldg(reinterpret_cast<const std::uint32_t*>(table_row_) + column);
    const uint2 id = __ldg(reinterpret_cast<const uint2*>(table_row_) + column);
    return id.y == 0 ? id.x : kNoBlock;
  }
  // Of keys below 2^31; others are past every end.
  __device__ std::uint32_t column_of(std::uint32_t key) const {
    return static_cast<std::uint32_t>(work_.by_block_keys.of(static_cast<std::int32_t>(key)));
  }
  __device__ std::uint32_t slot_of(std::uint32_t key) const {
    return key - column_of(key) * work_.block_keys;
  }

  // ---- boxes of a few keys, a lane each ----

  __device__ bool few_boxes() const {
    return uses_boxes() && work_.box_keys >= S::kTileKeys / 32;
  }

  // The first key of this lane's box in a tile; past 2^31 it is past every end.
  __device__ std::uint32_t first_of_box(std::int32_t base) const {
    return static_cast<std::uint32_t>(base) + static_cast<std::uint32_t>(lane_ * work_.box_keys);
  }
  __device__ std::uint32_t fetch_box_entry(std::int32_t base) const {
    if (lane_ * work_.box_keys >= S::kTileKeys) return kNoBlock;
    return fetch_entry(first_of_box(base), static_cast<std::uint32_t>(work_.box_keys - 1));
  }

  __device__ void send_boxes() {
#pragma unroll 1
    for (std::int32_t base = unit_.begin; base < unit_.end; base += S::kTileKeys) {
      const std::uint32_t block = entry_[0] < work_.block_limit ? entry_[0] : kNoBlock;
      entry_[0] = fetch_box_entry(base + S::kTileKeys);
      const BoxPlace place = {0, static_cast<std::int32_t>(slot_of(first_of_box(base))), 0,
                              static_cast<std::int32_t>(block)};
      if (of_values_) {
        ring_.wait_empty();
      } else {
        const std::uint32_t live = live_keys(base, __ballot_sync(0xffffffffu, block != kNoBlock));
#pragma unroll
        for (int i = 0; i < kLookups; ++i) live_[i] = __shfl_sync(0xffffffffu, live, i);
        announce();
      }
      if (lane_ == 0) arrive_and_expect(ring_.full_barrier(), S::kSlotBytes);
      const int first = lane_ * work_.box_keys;
      if (first < S::kTileKeys) copy_panels(ring_.slot() + static_cast<std::uint32_t>(first * kPanelBytes), place);
      step();
    }
  }

  // Lanes 0, 1, ... work out which of 32 keys each are mapped. `boxes`: those that are.
  __device__ std::uint32_t live_keys(std::int32_t base, std::uint32_t boxes) const {
    const int offset = lane_ % kLookups * 32;
    const std::int32_t from = max(seen_from_ - base - offset, 0);
    const std::int32_t to = min(unit_.end - base - offset, 32);
    if (from >= to) return 0;
    std::uint32_t mapped = 0xffffffffu;
    if (work_.box_keys < 32) {
      mapped = 0;
      const std::uint32_t keys_of_box = (1u << work_.box_keys) - 1;
      for (int key = 0; key < 32; key += work_.box_keys) {
        if ((boxes >> (offset + key) / work_.box_keys & 1u) != 0) mapped |= keys_of_box << key;
      }
    } else if ((boxes >> offset / work_.box_keys & 1u) == 0) {
      mapped = 0;
    }
    return mapped & (0xffffffffu >> (32 - to)) & (0xffffffffu << from);
  }

  // The panels of a box of this unit's heads.
  __device__ void copy_panels(std::uint32_t to, const BoxPlace& place) const {
    constexpr bool kJoined = S::kHeads > 1;
#pragma unroll
    for (int panel = 0; panel < S::kPanels; ++panel) {
      copy_box(
          to + panel * S::kTileKeys * kPanelBytes, map_,
          {kJoined ? first_head_ * S::kHeadBytes : panel * kPanelBytes, place.y, kJoined ? 0 : first_head_, place.w},
          ring_.full_barrier(), policy_);
    }
  }

  // ---- any blocks: a lookup for each key, a lane each ----

  __device__ void fetch_entries(std::int32_t base) {
    const std::uint32_t more = uses_boxes() ? static_cast<std::uint32_t>(work_.box_keys - 1) : 0;
#pragma unroll
    for (int i = 0; i < kLookups; ++i) entry_[i] = fetch_entry(key_of_lookup(base, i), more);
  }

  // Where the keys of a tile are. Unmapped blocks, and ids that are no block, are nowhere.
  __device__ void look_up(std::int32_t base) {
#pragma unroll
    for (int i = 0; i < kLookups; ++i) {
      const std::uint32_t key = key_of_lookup(base, i);
      block_[i] = entry_[i] < work_.block_limit ? entry_[i] : kNoBlock;
      slot_[i] = slot_of(key);
      live_[i] = __ballot_sync(0xffffffffu, block_[i] != kNoBlock && is_wanted(key, 0));
    }
  }

  // Waits for the next slot, and notes what comes there: by the lane that arrives for it.
  __device__ void announce() const {
    ring_.wait_empty();
    if (lane_ != 0) return;
    TileNote& note = ring_.note();
    note.unit = index_;
#pragma unroll
    for (int i = 0; i < kLookups; ++i) note.live[i] = live_[i];
  }

  // To the slot after the other warp's.
  __device__ void step() {
    __syncwarp();
    ring_.advance();
    ring_.advance();
  }

  __device__ void start_copies(std::int32_t base) const {
    if constexpr (kHasTensorCopies) {
      if (work_.boxes) [[likely]] {
        copy_boxes();
        return;
      }
    } else if (work_.pieces) {
      copy_pieces();
      arrive_after_copies(ring_.full_barrier());
      if (lane_ == 0) arrive(ring_.full_barrier());
      return;
    }
    copy_bytes(base);
    arrive(ring_.full_barrier());
    if (lane_ == 0) arrive(ring_.full_barrier());
  }

  // Boxes of keys of one block, each by the lane that has looked up its first key. Keys that are nowhere are in no
  // block: the copy engine writes zeros.
  __device__ void copy_boxes() const {
    if (lane_ == 0) arrive_and_expect(ring_.full_barrier(), S::kSlotBytes);
#pragma unroll
    for (int i = 0; i < kLookups; ++i) {
      const int key = i * 32 + lane_;
      if ((key & (work_.box_keys - 1)) != 0) continue;
      copy_panels(ring_.slot() + static_cast<std::uint32_t>(key * kPanelBytes),
                  {0, static_cast<std::int32_t>(slot_[i]), 0, static_cast<std::int32_t>(block_[i])});
    }
  }

  // The cache that this warp copies: a choice between two numbers each, since one between two parameters would be read
  // through a pointer.
  struct CacheBytes {
    const std::byte* data;
    std::int64_t block, slot, head;
  };
  __device__ CacheBytes cache_bytes() const {
    return {of_values_ ? call_.v_cache.data : call_.k_cache.data,
            of_values_ ? call_.v_cache.block_bytes : call_.k_cache.block_bytes,
            of_values_ ? call_.v_cache.slot_bytes : call_.k_cache.slot_bytes,
            of_values_ ? call_.v_cache.head_bytes : call_.k_cache.head_bytes};
  }

  // Rows in pieces of 16 bytes, a lane each. Rows of keys that are nowhere become zeros, and so do channels beyond the
  // head's.
  __device__ void copy_pieces() const {
    const CacheBytes cache = cache_bytes();
    const Pieces strides = {of_values_ ? work_.value.block : work_.key.block,
                            of_values_ ? work_.value.slot : work_.key.slot};
    constexpr int kHeadPieces = S::kHeadBytes / 16;
    constexpr int kKeysAtOnce = 32 / kPieces;
    const int piece = lane_ % kPieces;
    const std::int64_t head = first_head_ + min(piece / kHeadPieces, heads_ - 1);
    const bool used = piece / kHeadPieces < heads_ && piece % kHeadPieces * 16 < work_.head_bytes;
    const std::byte* from = cache.data + head * cache.head + (used ? piece % kHeadPieces * 16 : 0);
    const std::uint32_t to = ring_.slot() + slot_offset<S::kTileKeys>(lane_ / kPieces, piece);
    unrolled<S::kTileKeys / kKeysAtOnce>([&](auto step) {
      constexpr int kKey = step.value * kKeysAtOnce;
      const std::uint32_t block = block_[kKey / 32];
      const std::uint32_t place = block == kNoBlock ? 0 : block * strides.block + slot_[kKey / 32] * strides.slot;
      const int owner = kKey % 32 + lane_ / kPieces;
      const std::uint32_t of_key = __shfl_sync(0xffffffffu, place, owner);
      copy_once(moved<S::kTileKeys, kKey, 0>(to), from + std::uint64_t{of_key} * 16,
                used && (live_[kKey / 32] >> owner & 1u) != 0, policy_);
    });
  }

  // Rows at any address: byte by byte, with lookups of their own.
  __device__ void copy_bytes(std::int32_t base) const {
    const CacheBytes cache = cache_bytes();
    std::byte* const to = shared_ + (ring_.slot() - shared_address(shared_));
    __syncwarp();  // the note has been written
#pragma unroll 1
    for (int k = 0; k < S::kTileKeys; ++k) {
      const std::uint32_t key = static_cast<std::uint32_t>(base) + static_cast<std::uint32_t>(k);
      const bool mapped = (ring_.note().live[k / 32] >> k % 32 & 1u) != 0;
      std::int64_t row = 0;
      if (mapped) {
        const std::int64_t id = call_.block_table[unit_.sequence * call_.table_columns + column_of(key)];
        row = id * cache.block + slot_of(key) * cache.slot;
      }
#pragma unroll 1
      for (int b = lane_; b < S::kRowBytes; b += 32) {
        const int head = b / S::kHeadBytes;
        const int within = b % S::kHeadBytes;
        const bool valid = mapped && head < heads_ && within < work_.head_bytes;
        to[slot_offset<S::kTileKeys>(k, b / 16) + b % 16] =
            valid ? cache.data[row + (first_head_ + head) * cache.head + within] : std::byte{0};
      }
    }
  }

  const Call& call_;
  const Work& work_;
  const CUtensorMap* const map_;
  Ring<S> ring_;
  std::byte* const shared_;
  const bool of_values_;
  const int lane_;
  const std::uint64_t policy_;

  // of the unit
  Unit unit_{};
  std::int32_t index_ = 0;
  std::int32_t seen_from_ = 0;  // the first key that some row of the sequence sees
  std::int32_t first_head_ = 0, heads_ = 0;
  const std::byte* table_row_ = nullptr;

  // of a tile's keys 0 .. 31, 32 .. 63, ..., a lane each
  std::uint32_t entry_[kLookups];                   // of the next tile, as read
  std::uint32_t block_[kLookups], slot_[kLookups];  // of this one
  std::uint32_t live_[kLookups];                    // keys that are mapped, a bit each
};

}  // namespace octavo::cuda::decode
