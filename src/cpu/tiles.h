// Sizes that the schedule, the workspace and the kernels share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/call.h"

namespace octavo::cpu {

// KV positions per tile: tiles start at multiples of 64 from position 0 of a sequence, whatever the call, so that a
// row's arithmetic does not depend on which other rows or tokens are in the call. 64 keys = 4 AVX-512 registers of
// scores.
inline constexpr std::int64_t kTileKeys = 64;

// KV positions per chunk: softmax state starts afresh in each chunk and chunks are folded in ascending order. A chunk
// is the unit that parallel lanes share out, so the fold is the same for any number of lanes.
inline constexpr std::int64_t kChunkKeys = 1024;

// Query rows (tokens x heads of the group) that share one pass over the keys, about: whole tokens only, at least one.
// The more there are, the less decoding keys and transposing them costs beside the arithmetic on them (a fifth of a
// prompt's time at 64 rows, an eighth at 256), until their queries and sums leave the second-level cache. A call with
// too few tiles for its lanes has tiles of fewer rows.
inline constexpr std::int64_t kTileRows = 256;
inline constexpr std::int64_t kFewestTileRows = 64;
inline constexpr std::int64_t kTileFloats = 32768;  // of queries; there are no more of sums (v_head_size <= head_size)

// Every float buffer's rows are padded to whole vectors of the widest target (16 floats).
inline constexpr std::int64_t kPad = 16;
constexpr std::int64_t padded(std::int64_t n) noexcept {
  return (n + kPad - 1) / kPad * kPad;
}

// A tile of so few rows per KV head streams: it takes several heads, so that memory is read in its own order, and reads
// the cache's rows directly (stream-inl.h), in whole pieces. With more rows, decoding a key once into floats is cheaper
// than in registers for every four rows.
inline constexpr std::int64_t kStreamRows = 8;
inline constexpr std::int64_t kStreamTileRows = 64;  // of all its heads
inline constexpr std::int64_t kStreamChannels = 32;

inline bool streams(const Problem& problem, std::int64_t rows_per_head) noexcept {
  return rows_per_head <= kStreamRows && problem.head_size % kStreamChannels == 0 &&
         problem.v_head_size % kStreamChannels == 0;
}

// The most rows that tiles of this problem have, but for those of one token.
inline std::int64_t most_tile_rows(const Problem& problem) noexcept {
  return std::clamp(kTileFloats / padded(problem.head_size), kFewestTileRows, kTileRows);
}

inline std::int64_t tokens_per_tile(const Problem& problem, std::int64_t tile_rows) noexcept {
  return std::max<std::int64_t>(1, tile_rows / problem.group_size());
}

// Upper bound of the rows in any tile, where those of one KV head are cut at tile_rows.
inline std::int64_t max_tile_rows(const Problem& problem, std::int64_t tile_rows) noexcept {
  const std::int64_t tokens =
      std::min(tokens_per_tile(problem, tile_rows), std::max<std::int64_t>(1, problem.token_count));
  return std::max(problem.group_size() * tokens, std::min(kStreamTileRows, problem.num_heads * tokens));
}

inline bool has_integers(CacheType type) noexcept {
  return type == CacheType::kInt8 || type == CacheType::kInt4;
}

// Rows of Q that are multiplied together.
inline constexpr int kBlockRows = 4;

// Keys [begin, end) of a tile, outside of which a block of rows sees none. Only they are multiplied: at the diagonal of
// a causal mask, half of them.
struct BlockKeys {
  std::int32_t begin = 0, end = 0;
};

// Carves one block of floats into named arrays, or only measures it when data is nullptr.
class FloatArena {
 public:
  explicit FloatArena(float* data) noexcept : data_(data) {}
  float* take(std::int64_t count) noexcept {
    float* taken = data_ == nullptr ? nullptr : data_ + used_;
    used_ += padded(count);
    return taken;
  }
  std::int64_t used() const noexcept { return used_; }

 private:
  float* data_;
  std::int64_t used_ = 0;
};

// Online-softmax state of a tile's rows: unnormalised sums relative to the running maximum.
struct SoftmaxState {
  float* sums = nullptr;     // [rows][padded(v_head_size)]
  float* maximum = nullptr;  // [rows]
  float* weight = nullptr;   // [rows], sum of exp(score - maximum)

  static SoftmaxState carve(FloatArena& arena, const Problem& problem, std::int64_t rows) noexcept {
    SoftmaxState state;
    state.sums = arena.take(rows * padded(problem.v_head_size));
    state.maximum = arena.take(rows);
    state.weight = arena.take(rows);
    return state;
  }

  SoftmaxState from_row(const Problem& problem, std::int64_t first) const noexcept {
    return {sums + first * padded(problem.v_head_size), maximum + first, weight + first};
  }
};

// A row of Q as integers (integer-inl.h).
struct QuerySplit {
  float unit = -1.0f;        // what a 1 of the lowest piece is worth; -1: the row has floats only
  std::int32_t sum[3] = {};  // of each piece, times what a code's unsigned byte has too much, negated
  bool is_split() const noexcept { return unit >= 0.0f; }
};

// Rows of Q of one KV head: normalised, rotated and scaled, and what kernels for integers have made of them.
struct QueryRows {
  float* floats = nullptr;         // [rows][head_size]
  std::int32_t* pieces = nullptr;  // [rows][head_size]
  QuerySplit* splits = nullptr;    // [rows]
};

// One lane's scratch.
struct LaneScratch {
  QueryRows query;
  float* scores = nullptr;       // [rows][kTileKeys]
  float* keys = nullptr;         // [kTileKeys][padded(head_size)], decoded rows
  float* values = nullptr;       // [kTileKeys][padded(v_head_size)], decoded rows
  float* transposed = nullptr;   // [head_size][kTileKeys]
  float* zeros = nullptr;        // [padded(head_size)]: the row of a masked key
  float* row = nullptr;          // [padded(head_size)]
  float* cosine = nullptr;       // [padded(rotary_dim/2)]
  float* sine = nullptr;         // [padded(rotary_dim/2)]
  float* norm_weight = nullptr;  // [padded(head_size)]
  float* bias = nullptr;         // [kTileKeys]
  float* factors = nullptr;      // [rows]: what turns a row's sums into its output
  BlockKeys* blocks = nullptr;   // [rows / kBlockRows, rounded up]
  SoftmaxState chunk, running;

  static LaneScratch carve(FloatArena& arena, const Problem& problem, std::int64_t rows) noexcept {
    LaneScratch scratch;
    scratch.query.floats = arena.take(rows * problem.head_size);
    if (has_integers(problem.k_cache.logical)) {
      constexpr auto kSplitFloats = static_cast<std::int64_t>(sizeof(QuerySplit) / sizeof(float));
      scratch.query.pieces = reinterpret_cast<std::int32_t*>(arena.take(rows * problem.head_size));
      scratch.query.splits = reinterpret_cast<QuerySplit*>(arena.take(rows * kSplitFloats));
    }
    scratch.scores = arena.take(rows * kTileKeys);
    scratch.keys = arena.take(kTileKeys * padded(problem.head_size));
    scratch.values = arena.take(kTileKeys * padded(problem.v_head_size));
    scratch.transposed = arena.take(problem.head_size * kTileKeys);
    scratch.zeros = arena.take(problem.head_size);
    scratch.row = arena.take(problem.head_size);
    scratch.cosine = arena.take(problem.rotary_dim / 2);
    scratch.sine = arena.take(problem.rotary_dim / 2);
    scratch.norm_weight = arena.take(problem.head_size);
    scratch.bias = arena.take(kTileKeys);
    scratch.factors = arena.take(rows);
    static_assert(sizeof(BlockKeys) <= kBlockRows * sizeof(float));
    scratch.blocks = reinterpret_cast<BlockKeys*>(arena.take(rows + kBlockRows));
    scratch.chunk = SoftmaxState::carve(arena, problem, rows);
    scratch.running = SoftmaxState::carve(arena, problem, rows);
    return scratch;
  }

  LaneScratch from_row(const Problem& problem, std::int64_t first) const noexcept {
    LaneScratch part = *this;
    part.query.floats += first * problem.head_size;
    if (query.pieces != nullptr) {
      part.query.pieces += first * problem.head_size;
      part.query.splits += first;
    }
    part.scores += first * kTileKeys;
    part.factors += first;
    return part;
  }
};

// Rows that share their pass over the keys: tokens [token_begin, token_end) of a sequence, all query heads of
// head_count KV heads (1 unless the tile streams). Of a tile of one KV head, row r is token token_begin + r / group,
// head kv_head * group + r % group; the rows of more heads follow one another.
struct Tile {
  std::int32_t sequence = 0;
  std::int32_t kv_head = 0, head_count = 1;
  std::int32_t token_begin = 0, token_end = 0;  // within the sequence's new tokens
  std::int32_t chunk_begin = 0, chunk_end = 0;  // chunks that some row sees
  std::int64_t first_item = 0;                  // split tiles: index of its first chunk in the list of items

  std::int64_t rows_per_head(std::int64_t group) const noexcept { return (token_end - token_begin) * group; }
  std::int64_t rows(std::int64_t group) const noexcept { return rows_per_head(group) * head_count; }

  // The part of KV head kv_head + index.
  Tile head(std::int64_t index) const noexcept {
    Tile part = *this;
    part.kv_head += static_cast<std::int32_t>(index);
    part.head_count = 1;
    return part;
  }
};

}  // namespace octavo::cpu
