#include "cpu/schedule.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "contract/visible.h"
#include "cpu/float_mode.h"

// A call is a list of tiles (sequence, KV head, up to about 256 query rows), each with the chunks of keys that it sees.
//
// Most tiles are "whole": one lane walks all chunks in order and finishes. A tile with far more chunks than its share
// of the work is "split": its chunks are items that lanes take one at a time, each into a slot of its own, and
// afterwards the slots are folded in ascending order, exactly as a whole tile would have done. Slots are few, so that
// memory does not grow with the context: split items run in waves of one slot each, and the state of a tile that
// straddles two waves is carried over.

namespace octavo::cpu {
namespace {

constexpr std::int64_t kSlotsPerLane = 8;

// With fewer, lanes would wait long for the last ones: under a causal mask, tiles of late tokens cost the most.
constexpr std::int64_t kTilesPerLane = 16;

// Below this many elements to store, starting lanes costs more than storing.
constexpr std::int64_t kSerialStoreElements = 1 << 14;

std::int64_t slot_count(std::int64_t lanes) noexcept {
  return kSlotsPerLane * lanes;
}

// sum over sequences of ceil(new tokens / tokens per tile) <= tokens / per tile + sequences with tokens
std::int64_t max_tiles(const Problem& problem, std::int64_t tile_rows) noexcept {
  const std::int64_t per_head =
      problem.token_count / tokens_per_tile(problem, tile_rows) + std::min(problem.token_count, problem.batch_size);
  return per_head * problem.kv_num_heads;
}

// The rows of a tile, at most `rows`, of which there are enough for all lanes. count: how many tiles of so many rows.
template <typename Count>
std::int64_t choose_tile_rows(std::int64_t rows, std::int64_t lanes, const Count& count) noexcept {
  if (lanes == 1) return rows;
  while (rows > kFewestTileRows && count(rows) < kTilesPerLane * lanes) rows = std::max(kFewestTileRows, rows / 2);
  return rows;
}

// The most that a call of this problem chooses, whatever its lengths: what the workspace holds.
std::int64_t planned_tile_rows(const Problem& problem, std::int64_t lanes) noexcept {
  return choose_tile_rows(most_tile_rows(problem), lanes, [&](std::int64_t rows) { return max_tiles(problem, rows); });
}

// The workspace, carved: lanes' scratch, slots, two carries, then the tiles.
struct Carved {
  Tile* tiles = nullptr;
  FloatArena arena{nullptr};
  std::int64_t tile_rows = 0, rows = 0;
  std::int64_t lane_floats = 0, state_floats = 0;
  float* lanes = nullptr;
  float* states = nullptr;  // slots, then two carries

  Carved(const Problem& problem, std::int64_t lanes_, float* base) noexcept : arena(base) {
    tile_rows = planned_tile_rows(problem, lanes_);
    rows = max_tile_rows(problem, tile_rows);
    FloatArena lane(nullptr);
    LaneScratch::carve(lane, problem, rows);
    lane_floats = lane.used();
    FloatArena state(nullptr);
    SoftmaxState::carve(state, problem, rows);
    state_floats = state.used();
    lanes = arena.take(lane_floats * lanes_);
    states = arena.take(state_floats * (slot_count(lanes_) + 2));
    const auto tile_floats = static_cast<std::int64_t>(sizeof(Tile) / sizeof(float));
    tiles = reinterpret_cast<Tile*>(arena.take(max_tiles(problem, kFewestTileRows) * tile_floats));
  }
};
static_assert(sizeof(Tile) % sizeof(float) == 0);

class Schedule {
 public:
  Schedule(const Kernels& kernels, const Call& call, Workspace workspace, int lanes, Executor& executor) noexcept
      : kernels_(kernels),
        call_(call),
        problem_(*call.problem),
        lanes_(lanes),
        executor_(executor),
        carved_(problem_, lanes, static_cast<float*>(workspace.data)) {}

  void run() noexcept {
    store();
    clear_unwritten();
    list_tiles();
    attend();
  }

 private:
  // Runs body(lane, item) for all items, each on some lane. A lane draws from a range of its own, in ascending order,
  // so that it goes on where what it has prefetched lies, and then from the ranges of others.
  template <typename Body>
  void for_each(std::int64_t items, const Body& body) noexcept {
    constexpr std::int64_t kMaxRanges = 64;
    struct Context {
      const Body* body;
      std::int64_t items, ranges;
      std::atomic<std::int64_t> drawn[kMaxRanges];
    } context{&body, items, std::min({lanes_, items, kMaxRanges}), {}};
    const auto task = [](void* opaque, std::int64_t lane) {
      const DefaultFloatMode mode;
      auto& shared = *static_cast<Context*>(opaque);
      for (std::int64_t i = 0; i < shared.ranges; ++i) {
        const std::int64_t range = (lane + i) % shared.ranges;
        const std::int64_t begin = range * shared.items / shared.ranges;
        const std::int64_t end = (range + 1) * shared.items / shared.ranges;
        while (true) {
          const std::int64_t item = begin + shared.drawn[range].fetch_add(1, std::memory_order_relaxed);
          if (item >= end) break;
          (*shared.body)(lane, item);
        }
      }
    };
    if (items == 0) return;
    if (items == 1 || lanes_ == 1) {
      task(&context, 0);
    } else {
      executor_.parallel_for(std::min<std::int64_t>(lanes_, items), task, &context);
    }
  }

  LaneScratch scratch(std::int64_t lane) const noexcept {
    FloatArena arena(carved_.lanes + lane * carved_.lane_floats);
    LaneScratch scratch = LaneScratch::carve(arena, problem_, carved_.rows);
    std::fill_n(scratch.zeros, padded(problem_.head_size), 0.0f);
    return scratch;
  }

  SoftmaxState state(std::int64_t index) const noexcept {
    FloatArena arena(carved_.states + index * carved_.state_floats);
    return SoftmaxState::carve(arena, problem_, carved_.rows);
  }
  SoftmaxState carry(std::int64_t parity) const noexcept { return state(slot_count(lanes_) + parity); }

  std::int64_t live_tokens() const noexcept {
    return problem_.batch_size == 0 ? 0 : call_.cumulative[problem_.batch_size];
  }

  void store() noexcept {
    const std::int64_t tokens = live_tokens();
    const std::int64_t elements = tokens * problem_.kv_num_heads * problem_.head_size;
    const std::int64_t pieces = elements < kSerialStoreElements ? 1 : 4 * lanes_;
    const std::int64_t share = (tokens + pieces - 1) / pieces;
    if (tokens == 0) return;
    for_each((tokens + share - 1) / share, [&](std::int64_t lane, std::int64_t piece) {
      LaneScratch mine = scratch(lane);
      kernels_.store_tokens(call_, piece * share, std::min(tokens, (piece + 1) * share), mine);
    });
  }

  // Padding tokens' rows, and the entries of output_qk that no tile writes.
  void clear_unwritten() noexcept {
    const std::int64_t live = live_tokens();
    const auto row_bytes =
        problem_.num_heads * problem_.v_head_size * static_cast<std::int64_t>(size_in_bytes(problem_.element_type));
    if (live < problem_.token_count) {
      std::memset(call_.output + live * row_bytes, 0,
                  static_cast<std::size_t>((problem_.token_count - live) * row_bytes));
    }
    if (call_.lse != nullptr) {
      for (std::int64_t head = 0; head < problem_.num_heads; ++head) {
        for (std::int64_t token = live; token < problem_.token_count; ++token) {
          call_.lse[head * problem_.token_count + token] = -std::numeric_limits<float>::infinity();
        }
      }
    }
    if (problem_.qk_output == QkOutput::kNone || problem_.token_count == 0) return;
    const auto qk_row_bytes =
        problem_.max_context_len * static_cast<std::int64_t>(size_in_bytes(problem_.output_qk_type));
    for_each(problem_.num_heads, [&](std::int64_t, std::int64_t head) {
      const std::int64_t bytes = problem_.token_count * qk_row_bytes;
      if (bytes > 0) std::memset(call_.output_qk + head * bytes, 0, static_cast<std::size_t>(bytes));
    });
  }

  // The chunks that a tile's tokens see.
  void find_chunks(Tile& tile) const noexcept {
    std::int64_t first = std::numeric_limits<std::int64_t>::max();
    std::int64_t last = 0;
    const std::int64_t kv_length = call_.kv_length(tile.sequence);
    for (std::int64_t j = tile.token_begin; j < tile.token_end; ++j) {
      const contract::Range range = contract::visible_range(problem_, call_.position(tile.sequence, j), kv_length);
      if (range.empty()) continue;
      first = std::min(first, range.begin);
      last = std::max(last, range.end);
    }
    if (first < last) {
      tile.chunk_begin = static_cast<std::int32_t>(first / kChunkKeys);
      tile.chunk_end = static_cast<std::int32_t>((last + kChunkKeys - 1) / kChunkKeys);
    }
  }

  template <typename Visit>
  void visit_tiles(const Visit& visit) const noexcept {
    const std::int64_t step = tokens_per_tile(problem_, tile_rows_);
    for (std::int64_t sequence = 0; sequence < problem_.batch_size; ++sequence) {
      const std::int64_t tokens = call_.new_tokens(sequence);
      for (std::int64_t begin = 0; begin < tokens; begin += step) {
        Tile tile;
        tile.sequence = static_cast<std::int32_t>(sequence);
        tile.token_begin = static_cast<std::int32_t>(begin);
        tile.token_end = static_cast<std::int32_t>(std::min(tokens, begin + step));
        find_chunks(tile);
        const std::int64_t rows = tile.rows_per_head(problem_.group_size());
        const std::int64_t heads = streams(problem_, rows) ? std::min(streamed_heads_, kStreamTileRows / rows) : 1;
        for (std::int64_t head = 0; head < problem_.kv_num_heads; head += heads) {
          tile.kv_head = static_cast<std::int32_t>(head);
          tile.head_count = static_cast<std::int32_t>(std::min(heads, problem_.kv_num_heads - head));
          visit(tile);
        }
      }
    }
  }

  // Tiles of so many rows, had all of them one KV head.
  std::int64_t count_tiles(std::int64_t tile_rows) const noexcept {
    const std::int64_t step = tokens_per_tile(problem_, tile_rows);
    std::int64_t per_head = 0;
    for (std::int64_t sequence = 0; sequence < problem_.batch_size; ++sequence) {
      per_head += (call_.new_tokens(sequence) + step - 1) / step;
    }
    return per_head * problem_.kv_num_heads;
  }

  // Split tiles first in the list, whole ones after them.
  void list_tiles() noexcept {
    tile_rows_ = choose_tile_rows(tile_rows_, lanes_, [this](std::int64_t rows) { return count_tiles(rows); });
    std::int64_t chunks = 0;
    while (true) {
      chunks = 0;
      visit_tiles([&](const Tile& tile) { chunks += tile.chunk_end - tile.chunk_begin; });
      if (lanes_ == 1 || chunks >= 2 * lanes_ || streamed_heads_ == 1) break;
      streamed_heads_ = (streamed_heads_ + 1) / 2;
    }
    // A whole tile may take up to a quarter of a lane's share, so that the last ones to finish do not keep the others
    // waiting long.
    const std::int64_t whole_limit = lanes_ == 1 ? chunks : std::max<std::int64_t>(1, chunks / (4 * lanes_));
    const auto is_split = [&](const Tile& tile) { return tile.chunk_end - tile.chunk_begin > whole_limit; };
    visit_tiles([&](const Tile& tile) { split_tiles_ += is_split(tile) ? 1 : 0; });
    std::int64_t whole_at = split_tiles_;
    std::int64_t split_at = 0;
    visit_tiles([&](Tile tile) {
      if (is_split(tile)) {
        tile.first_item = split_items_;
        split_items_ += tile.chunk_end - tile.chunk_begin;
        carved_.tiles[split_at++] = tile;
      } else {
        carved_.tiles[whole_at++] = tile;
      }
    });
    tiles_ = whole_at;
  }

  void attend() noexcept {
    const std::int64_t slots = slot_count(lanes_);
    const std::int64_t whole_tiles = tiles_ - split_tiles_;
    std::int64_t wave_begin = 0;
    do {
      const std::int64_t wave = std::min(slots, split_items_ - wave_begin);
      const std::int64_t others = wave_begin == 0 ? whole_tiles : 0;  // whole tiles fill the first wave up
      for_each(wave + others, [&](std::int64_t lane, std::int64_t item) {
        LaneScratch mine = scratch(lane);
        if (item < wave) {
          attend_item(wave_begin + item, item, mine);
        } else {
          attend_whole(carved_.tiles[split_tiles_ + item - wave], mine);
        }
      });
      if (wave > 0) fold_wave(wave_begin, wave);
      wave_begin += wave;
      parity_ ^= 1;
    } while (wave_begin < split_items_);
  }

  void attend_whole(const Tile& tile, LaneScratch& mine) const noexcept {
    kernels_.load_queries(call_, tile, mine);
    kernels_.attend_chunk(call_, tile, tile.chunk_begin, mine, mine.running);
    for (std::int64_t chunk = tile.chunk_begin + 1; chunk < tile.chunk_end; ++chunk) {
      kernels_.attend_chunk(call_, tile, chunk, mine, mine.chunk);
      kernels_.fold(call_, tile, mine.chunk, mine.running);
    }
    kernels_.finish(call_, tile, mine.running, mine);
  }

  void attend_item(std::int64_t item, std::int64_t slot, LaneScratch& mine) const noexcept {
    const Tile& tile = carved_.tiles[split_tile_of(item)];
    SoftmaxState result = state(slot);
    kernels_.load_queries(call_, tile, mine);
    kernels_.attend_chunk(call_, tile, tile.chunk_begin + (item - tile.first_item), mine, result);
  }

  std::int64_t split_tile_of(std::int64_t item) const noexcept {
    const Tile* begin = carved_.tiles;
    const Tile* after = std::upper_bound(begin, begin + split_tiles_, item, [](std::int64_t wanted, const Tile& tile) {
      return wanted < tile.first_item;
    });
    return after - begin - 1;
  }

  // Folds the slots of a wave, tile by tile. Only the first tile can have been carried in, only the last is carried
  // out.
  void fold_wave(std::int64_t wave_begin, std::int64_t wave) noexcept {
    const std::int64_t wave_end = wave_begin + wave;
    const std::int64_t first_tile = split_tile_of(wave_begin);
    const std::int64_t last_tile = split_tile_of(wave_end - 1);
    for_each(last_tile - first_tile + 1, [&](std::int64_t lane, std::int64_t index) {
      const Tile& tile = carved_.tiles[first_tile + index];
      const std::int64_t tile_end = tile.first_item + tile.chunk_end - tile.chunk_begin;
      const std::int64_t begin = std::max(tile.first_item, wave_begin);
      const std::int64_t end = std::min(tile_end, wave_end);
      const bool carried_in = tile.first_item < wave_begin;
      SoftmaxState into = carried_in ? carry(parity_) : state(begin - wave_begin);
      for (std::int64_t item = carried_in ? begin : begin + 1; item < end; ++item) {
        kernels_.fold(call_, tile, state(item - wave_begin), into);
      }
      LaneScratch mine = scratch(lane);
      if (end == tile_end) {
        kernels_.finish(call_, tile, into, mine);
      } else {
        std::copy_n(into.sums, carved_.state_floats, carry(parity_ ^ 1).sums);
      }
    });
  }

  const Kernels& kernels_;
  const Call& call_;
  const Problem& problem_;
  const std::int64_t lanes_;
  Executor& executor_;
  Carved carved_;
  std::int64_t tiles_ = 0, split_tiles_ = 0, split_items_ = 0;
  std::int64_t parity_ = 0;
  std::int64_t tile_rows_ = carved_.tile_rows;
  std::int64_t streamed_heads_ = problem_.kv_num_heads;  // KV heads of a tile that streams, at most
};

}  // namespace

std::size_t schedule_workspace_bytes(const Problem& problem, int lanes) noexcept {
  return static_cast<std::size_t>(Carved(problem, lanes, nullptr).arena.used()) * sizeof(float);
}

void run_schedule(const Kernels& kernels, const Call& call, Workspace workspace, int lanes,
                  Executor& executor) noexcept {
  Schedule(kernels, call, workspace, lanes, executor).run();
}

}  // namespace octavo::cpu
