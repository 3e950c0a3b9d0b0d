// Sizes of the decode kernel: tiles, warps, shared memory. Host and device read the same numbers.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/call.h"
#include "cuda/device/quotient.h"

namespace octavo::cuda::decode {

// Keys are summed up in segments of this many positions, and segments are folded by a fixed tree: neither depends on
// anything but a sequence's own lengths. Short sequences have shorter ones, so that few of them still fill a device.
inline constexpr int kSegmentShift = 9;  // 512 keys; twice, four times as many in longer sequences
inline constexpr int kMaxTokens = 8;     // new tokens of a sequence that this kernel takes
// A window's keys begin at a multiple of this and reach over all new tokens: so many more.
inline constexpr int kWindowKeys = 32;
inline constexpr int kRounded = 64;
static_assert(kWindowKeys - 1 + kMaxTokens - 1 <= kRounded);

// A window leaves few keys, and many sequences are as long as it: shorter segments for more blocks.
OCTAVO_HOST_DEVICE constexpr int segment_shift(std::int32_t keys, bool windowed) {
  if (windowed && keys <= 2048 + kRounded) return kSegmentShift;
  return keys <= 8192 + kRounded ? kSegmentShift + 1 : kSegmentShift + 2;
}

// Partial results that the workspace has room for, however short the sequences: several for each block of a device.
inline constexpr int kPartials = 1536;

// Sequences of at most so many query rows a KV head are handled as by kernels of one row tile in every kernel (Shape).
inline constexpr int kOneTileRows = 8;

// Blocks that a launch may have at most: the workspace has a stack of nodes for each.
inline constexpr int kMaxBlocks = 384;

inline constexpr int kMaxBatch = 1024;  // the schedule of a call is in each block's shared memory

// Memory is read in lines of 128 bytes. A row of the cache lies in shared memory as panels of a line (slot_offset() in
// shared_rows.cuh).
inline constexpr int kPanelBytes = 128;

constexpr int bits_of(CacheType type) {
  return type == CacheType::kInt4 ? 4 : type == CacheType::kInt8 || type == CacheType::kFloat8E4M3FN ? 8 : 16;
}

// One compiled kernel: a cache type, heads of up to kHead channels, and 8 * kTiles query rows a KV head.
//
// With one row tile each working warp has its own keys in both products and its own maximum; what the warps have is
// folded at the end of a segment. With more row tiles a warp has its own keys in K Q^T, and the weights go through
// shared memory, so that in V^T P^T it has all keys of the tile for its own channels: fewer registers for sums, nothing
// to fold, but the warps of a head keep in step. The two have different bits, so the form follows a sequence's own rows
// (kOneTileRows), whatever the kernel has room for.
template <CacheType kCacheType, int kHeadSize, int kRowTiles>
struct Shape {
  static constexpr CacheType kType = kCacheType;
  static constexpr int kHead = kHeadSize;
  static constexpr int kTiles = kRowTiles;  // eights of rows of a KV head
  static constexpr bool kSharesWeights = kTiles > 1;
  using OneTile = Shape<kType, kHead, 1>;

  static constexpr bool kWide = bits_of(kType) == 16;
  static constexpr int kHeadBytes = kHead * bits_of(kType) / 8;
  // A row is that of as many KV heads as a line of memory holds.
  static constexpr int kHeads = kHeadBytes < kPanelBytes ? kPanelBytes / kHeadBytes : 1;
  static constexpr int kRowBytes = kHeads * kHeadBytes;
  static constexpr int kPanels = kRowBytes / kPanelBytes;
  static constexpr int kRows = 8 * kTiles;  // of a KV head
  static constexpr int kAllRows = kRows * kHeads;
  static constexpr int kSteps = kHead / 16;                 // of a tensor-core product over the channels
  static constexpr int kAllSize = kHead * kTiles * kHeads;  // shared memory for sums grows with it

  // A block takes its keys in tiles. Two warps copy them, each of the others works on some keys of a tile for one KV
  // head. kKeys and kGroups decide the order of sums: they may depend on the type and the head only.
  static constexpr int kKeys = kRowBytes == kPanelBytes ? 32 : 16;  // of a warp in a tile
  static constexpr int kGroups = kHeads == 4 ? 2 : 4;               // warps of a head
  static constexpr int kWarps = kGroups * kHeads;                   // that work
  static constexpr int kWorkers = 32 * kWarps;
  static constexpr int kThreads = kWorkers + 64;
  static constexpr int kTileKeys = kGroups * kKeys;

  static constexpr int kSlotBytes = kTileKeys * kRowBytes;  // K or V of a tile
  // Blocks of eight working warps are alone on an SM but for rows of a quarter line: those have the registers for two.
  static constexpr int kBlocksPerSm = (kWarps == 8 && kHeads != 4) || kSlotBytes > 16384 ? 1 : 2;
  // Slots of the ring: enough bytes under way, and not more (measured: docs/performance.md).
  static constexpr int slots() {
    if (kSlotBytes > 16384) return kTiles == 1 ? 4 : 3;
    if (kSlotBytes < 16384) return 6;
    if (kBlocksPerSm == 1) return kTiles == 1 ? 5 : 4;
    return 3;
  }
  static constexpr int kSlots = slots();
  // The lowest levels of a block's stack of nodes (tree.cuh) are in shared memory.
  static constexpr int kLevels = kAllSize >= 512 ? 0 : kAllSize == 256 ? 1 : 2;
  static constexpr int kExchangeStride = kHead + 4;  // floats of a row: rows start in different banks
  // Numbers of four channels and one row, each folded by one thread.
  static constexpr int kItems = (kAllRows * kHead / 4 + kWorkers - 1) / kWorkers;
  static constexpr bool kQueryInRegisters = kHead * kTiles <= 128;

  // Rows of the exchange: those of every group of warps, or where weights are shared those of all.
  static constexpr int kExchangeRows =
      kSharesWeights ? (kAllRows > kGroups * 8 * kHeads ? kAllRows : kGroups * 8 * kHeads) : kGroups * kAllRows;
  // Weights of a tile: 8 x 8 matrices of 128 bytes, for eight keys and a row tile each.
  static constexpr int kWeightBytes = kSharesWeights ? kTileKeys * kAllRows * 2 : 0;
};

// What comes with K of a tile; with V, only to the warp that copies it.
struct TileNote {
  std::int32_t unit;      // whose keys these are; -1: there are no more
  std::uint32_t live[4];  // keys that are mapped, a bit each
  std::uint32_t unused[3];
};

// What all warps of a block need and some work out or read for them.
struct CallFacts {
  std::int32_t run_shift, full_units, units;  // units.cuh
  float key_scale, value_scale;               // PER_TENSOR, else 1
};

// Shared memory, in order.
struct Layout {
  int ring = 0;             // [slots][slot bytes]
  int notes = 0;            // [slots] TileNote
  int full = 0, empty = 0;  // [slots] barriers
  int query = 0;            // fragments
  int exchange = 0;         // [exchange rows][stride] floats: sums of the warps; rows of Q before that
  int exchange_state = 0;   // [groups][rows] float2
  int weights = 0;          // [2] of a tile, in turn
  int maxima = 0;           // [groups][rows] floats, where weights are shared
  int handed = 0;           // a barrier: the exchange is full
  int folded = 0;           // and another: it is free again
  int stack_sums = 0;       // [levels][rows * head / 4] float4
  int stack_states = 0;     // the same, float2
  int row_scale = 0;        // [rows] floats
  int row_bias = 0;         // the same
  int flag = 0;             // a word that one thread has for all workers
  int next = 0;             // one that the warps that copy share
  int facts = 0;            // CallFacts
  int full_units = 0;       // [batch]
  int tail_units = 0;       // [batch]
  int partial_base = 0;     // [batch]
  int tail_order = 0;       // [batch]
  int keys = 0;             // [batch]
  int width = 0;            // [batch]
  int spans = 0;            // [batch + 1] SequenceSpan
  int bytes = 0;
};

template <typename S>
OCTAVO_HOST_DEVICE constexpr Layout layout_of(int batch) {
  Layout layout;
  int used = 0;
  const auto take = [&used](int bytes) {
    const int at = used;
    used = (used + bytes + 15) / 16 * 16;
    return at;
  };
  layout.ring = take(S::kSlots * S::kSlotBytes);
  layout.notes = take(S::kSlots * static_cast<int>(sizeof(TileNote)));
  layout.full = take(S::kSlots * 8);
  layout.empty = take(S::kSlots * 8);
  layout.query = take(S::kAllRows * S::kSteps * 32);
  layout.exchange = take(S::kExchangeRows * S::kExchangeStride * 4);
  layout.exchange_state = take(S::kGroups * S::kAllRows * 8);
  layout.weights = take(2 * S::kWeightBytes);
  layout.maxima = take(S::kSharesWeights ? S::kGroups * S::kAllRows * 4 : 0);
  layout.handed = take(8);
  layout.folded = take(8);
  layout.stack_sums = take(S::kLevels * S::kAllSize * 2 * 16);
  layout.stack_states = take(S::kLevels * S::kAllSize * 2 * 8);
  layout.row_scale = take(S::kAllRows * 4);
  layout.row_bias = take(S::kAllRows * 4);
  layout.flag = take(4);
  layout.next = take(4);
  layout.facts = take(static_cast<int>(sizeof(CallFacts)));
  // Tables of one size, so that no place has to be worked out from the one before.
  const int table = static_cast<int>((static_cast<unsigned>(batch) + 3) / 4 * 16);
  layout.full_units = used;
  layout.tail_units = used + table;
  layout.partial_base = used + 2 * table;
  layout.tail_order = used + 3 * table;
  layout.keys = used + 4 * table;
  layout.width = used + 5 * table;
  layout.spans = used + 6 * table;
  layout.bytes = layout.spans + (batch + 1) * static_cast<int>(sizeof(SequenceSpan));
  return layout;
}

// A cache's strides in pieces of 16 bytes.
struct Pieces {
  std::uint32_t block = 0, slot = 0;
};

// What the decode kernel gets besides the Call.
struct Work {
  std::int32_t head_groups = 0;                                 // of KV heads, a block's worth each
  Quotient by_head_groups, by_group, by_blocks, by_block_keys;  // head_groups, Call::group, blocks, block_keys
  std::int32_t head_bytes = 0;                                  // of K or V of one head and key
  std::int32_t partials = 0;
  std::int32_t blocks = 0;        // of the launch
  std::uint32_t block_keys = 1;   // block_size, as far as positions reach
  std::uint32_t block_limit = 0;  // ids below it are blocks
  int shared_limit = 0;           // bytes of dynamic shared memory that a block of the device can have
  int shared_least = 0;           // more than a third of an SM's: see backend.cc
  bool pieces = false;            // rows start at multiples of 16 bytes whose number fits 32 bits
  bool boxes = false;             // the maps are there, and the device copies by them
  std::int32_t window = 0;        // keys that a query sees at most, as far as positions reach; 0: all before it
  std::int32_t box_keys = 1;      // of a copy by them: a power of two that divides block_size
  std::uint32_t no_bits = 0;      // zero, which the compiler does not know
  Pieces key, value;
  std::int32_t levels = 0;             // of a block's stack of nodes (tree.cuh); 0: no sequence has a second segment
  float4* stack_sums = nullptr;        // [blocks][levels][rows * head / 4]: the levels that are not in shared memory
  float2* stack_states = nullptr;      // the same
  float* sums = nullptr;               // [partials][rows][head], relative to the maximum
  float2* states = nullptr;            // [partials][rows]: maximum (base-2 logit), weight
  std::uint32_t* arrived = nullptr;    // [partials]: units, or groups of them, that are done (merge_if_last); zero
                                       // before the launch
  std::uint32_t* next_unit = nullptr;  // zero before the launch
};

// The caches as the copy engine sees them: a parameter of its own, since the compiler no longer keeps in registers or
// reads as constants what stands beside something whose address is taken.
struct Maps {
  CUtensorMap key{}, value{};
};

}  // namespace octavo::cuda::decode
