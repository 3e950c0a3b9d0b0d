#include "contract/duplicate_slots.h"

#include <algorithm>
#include <array>
#include <memory>
#include <new>

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

}  // namespace

DuplicateSlot find_duplicate_slot(const HostData& data) noexcept {
  std::int64_t count = 0;
  std::int64_t free_from = 0;  // every slot so far is below it
  bool ascending = true;
  for_each_run(data, [&](const Run& run) {
    ++count;
    ascending = ascending && run.slot >= free_from;
    free_from = run.slot + run.length;
  });
  if (ascending) return {};

  std::array<Run, 256> few;
  std::unique_ptr<Run[]> many;
  Run* runs = few.data();
  if (count > static_cast<std::int64_t>(few.size())) {
    many.reset(new (std::nothrow) Run[static_cast<std::size_t>(count)]);
    if (many == nullptr) return {DuplicateSlot::Outcome::kOutOfMemory, 0, 0, 0};
    runs = many.get();
  }
  Run* end = runs;
  for_each_run(data, [&end](const Run& run) { *end++ = run; });
  std::sort(runs, end, [](const Run& a, const Run& b) { return a.slot < b.slot; });

  // Sorted by their first slot, any overlap shows between neighbours.
  for (const Run* run = runs; run + 1 < end; ++run) {
    const Run& next = run[1];
    if (next.slot >= run->slot + run->length) continue;
    const std::int64_t token = run->token + (next.slot - run->slot);
    return {DuplicateSlot::Outcome::kFound, next.slot, std::min(token, next.token), std::max(token, next.token)};
  }
  return {};
}

}  // namespace octavo::contract
