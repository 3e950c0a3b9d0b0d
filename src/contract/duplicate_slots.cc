#include "contract/duplicate_slots.h"

#include <algorithm>
#include <array>

namespace octavo::contract {
namespace {

// Consecutive tokens in consecutive slots: a prompt is one run a block or less, so runs are far fewer than tokens.
struct Run {
  std::int64_t slot = 0;
  std::int64_t token = 0;
  std::int64_t length = 0;
};

// Where the token of a sequence at `position` is written; -1: nowhere.
std::int64_t write_slot(const HostData& data, std::int64_t sequence, std::int64_t token, std::int64_t position) {
  if (data.problem.has(Feature::kSlotMapping)) return data.slot(token);
  const std::int64_t block_size = data.problem.block_size;
  const std::int64_t block = data.block_id(sequence, position / block_size);
  return block < 0 ? -1 : block * block_size + position % block_size;
}

template <typename Visit>
void for_each_run(const HostData& data, Visit&& visit) {
  Run run;
  for (std::int64_t sequence = 0; sequence < data.problem.batch_size; ++sequence) {
    const std::int64_t begin = data.offset(sequence);
    for (std::int64_t token = begin; token < data.offset(sequence + 1); ++token) {
      const std::int64_t slot = write_slot(data, sequence, token, data.past(sequence) + token - begin);
      if (slot < 0) continue;
      const bool extends = run.length > 0 && slot == run.slot + run.length && token == run.token + run.length;
      if (!extends && run.length > 0) visit(run);
      run = extends ? Run{run.slot, run.token, run.length + 1} : Run{slot, token, 1};
    }
  }
  if (run.length > 0) visit(run);
}

// A total order: no two runs start with the same token.
bool before(const Run& a, const Run& b) {
  return a.slot != b.slot ? a.slot < b.slot : a.token < b.token;
}

bool ascends(const HostData& data) {
  std::int64_t free_from = 0;  // every slot so far is below it
  bool ascending = true;
  for_each_run(data, [&](const Run& run) {
    ascending = ascending && run.slot >= free_from;
    free_from = run.slot + run.length;
  });
  return ascending;
}

}  // namespace

std::optional<DuplicateSlot> find_duplicate_slot(const HostData& data) noexcept {
  if (ascends(data)) return std::nullopt;

  // Run by run in the order of slots, any overlap shows between neighbours. run() must not allocate, so the runs are
  // sorted as many at a time as fit here; one pass over the tokens collects the next ones.
  std::array<Run, 1024> runs;
  Run previous;  // length 0: none yet
  bool more = true;
  while (more) {
    more = false;
    auto end = runs.begin();  // [runs.begin(), end) is a heap of the first runs after `previous`, the last on top
    for_each_run(data, [&](const Run& run) {
      if (previous.length > 0 && !before(previous, run)) return;
      if (end == runs.end()) {
        more = true;
        if (!before(run, runs.front())) return;
        std::pop_heap(runs.begin(), end--, before);
      }
      *end++ = run;
      std::push_heap(runs.begin(), end, before);
    });
    std::sort_heap(runs.begin(), end, before);
    for (auto run = runs.begin(); run != end; previous = *run++) {
      if (previous.length == 0 || run->slot >= previous.slot + previous.length) continue;
      const std::int64_t token = previous.token + (run->slot - previous.slot);
      return DuplicateSlot{run->slot, std::min(token, run->token), std::max(token, run->token)};
    }
  }
  return std::nullopt;
}

}  // namespace octavo::contract
