// Which sequence a token, a row tile or a split token belongs to, and what a query sees.
#pragma once

#include <cstdint>

#include "cuda/call.h"

namespace octavo::cuda {

// The last of `count` records whose field is not above `value`; -1 if there is none. The field never falls.
__device__ inline int last_not_above(const SequenceRecord* records, int count, std::int32_t SequenceRecord::*field,
                                     std::int64_t value) {
  int low = 0;
  int high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (records[middle].*field <= value) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low - 1;
}

// The same by a whole warp, which looks at 32 records at once: two steps instead of ten for a batch of 1,000.
__device__ inline int warp_last_not_above(const SequenceRecord* records, int count, std::int32_t SequenceRecord::*field,
                                          std::int64_t value) {
  const int lane = threadIdx.x % 32;
  int low = 0;  // the answer is in [low - 1, low + span)
  int span = count;
  while (span > 0) {
    const int step = (span + 31) / 32;
    const int probe = low + lane * step;
    const bool below = probe < low + span && records[probe].*field <= value;
    const int passed = __popc(__ballot_sync(0xffffffffu, below));  // probes 0 .. passed-1 are not above
    if (passed == 0) return low - 1;
    const int last = low + (passed - 1) * step;
    span = min(step - 1, low + span - last - 1);
    low = last + 1;
  }
  return low - 1;
}

// The sequence of `found` if it owns the token; -1 for padding and for tokens of rejected sequences.
__device__ inline int owner_if(const Call& call, int found, int token) {
  if (found < 0 || token - call.scratch.records[found].start >= call.scratch.records[found].new_tokens) return -1;
  return found;
}

// The logical position of a sequence's j-th new token: for RoPE and for the causal and window masks.
__device__ inline std::int32_t position_of(const Call& call, const SequenceRecord& record, int j) {
  return call.positions != nullptr ? call.positions[record.start + j] : record.past + j;
}

struct KeyRange {
  std::int32_t begin, end;
};

// The half-open range of KV positions that a query at `position` may see; unmapped blocks are masked elsewhere.
__device__ inline KeyRange visible(const Call& call, std::int32_t position, std::int32_t kv_length) {
  if (!call.causal) return {0, kv_length};
  const std::int64_t after = static_cast<std::int64_t>(position) + 1;
  const auto end = static_cast<std::int32_t>(after < kv_length ? after : kv_length);
  const auto begin = static_cast<std::int32_t>(call.window > 0 && after > call.window ? after - call.window : 0);
  return {begin < end ? begin : end, end};
}

__device__ inline bool is_split(const Call& call, const SequenceRecord& record) {
  return call.scratch.chunks > 1 && record.new_tokens <= kMaxSplitTokens;
}

// Chunks of a split sequence. Where the bound of the KV length was too small, the last one has all the rest.
__device__ inline int chunks_of(const Call& call, const SequenceRecord& record) {
  const std::int64_t keys = chunk_keys(record.kv_length());
  const auto chunks = static_cast<int>((record.kv_length() + keys - 1) / keys);
  return min(chunks, call.scratch.chunks);
}

// A block-table entry under way: fetch() starts the read, and only block() waits for it.
struct PageEntry {
  uint2 raw{};
  std::int32_t slot = 0;  // of the position within its block

  // Reads nothing unless `wanted`; the entry is then unmapped.
  __device__ void fetch(const Call& call, int sequence, std::int32_t position, bool wanted) {
    // Positions fit 32 bits, whose division is several times cheaper; a larger block holds every position.
    const auto place = static_cast<std::uint32_t>(position);
    const bool small = call.block_size <= 0x7fffffff;
    const std::uint32_t column = small ? place / static_cast<std::uint32_t>(call.block_size) : 0;
    slot = static_cast<std::int32_t>(small ? place - column * static_cast<std::uint32_t>(call.block_size) : place);
    raw = make_uint2(0xffffffffu, 0xffffffffu);
    if (!wanted) return;
    const std::int64_t at = sequence * call.table_columns + column;
    if (call.block_table.wide) {
      raw = static_cast<const uint2*>(call.block_table.data)[at];
    } else {
      raw.x = static_cast<const std::uint32_t*>(call.block_table.data)[at];
    }
  }

  // -1 where the position is unmapped or the id is no block.
  __device__ std::int64_t block(const Call& call) const {
    const std::int64_t id = call.block_table.wide ? static_cast<std::int64_t>(std::uint64_t{raw.y} << 32 | raw.x)
                                                  : static_cast<std::int64_t>(static_cast<std::int32_t>(raw.x));
    return id >= 0 && id < call.num_blocks ? id : -1;
  }
};

}  // namespace octavo::cuda
