// Finding two tokens that would be written to the same slot.
#pragma once

#include <cstdint>

#include "contract/host_data_reader.h"

namespace octavo::contract {

struct DuplicateSlot {
  enum class Outcome : std::uint8_t { kNone, kFound, kOutOfMemory };
  Outcome outcome = Outcome::kNone;
  std::int64_t slot = 0;
  std::int64_t first_token = 0;
  std::int64_t second_token = 0;
};

// Slots come from slot_mapping, or else from the positions through block_table. Needs the other D rules about lengths,
// ids and slots to hold.
DuplicateSlot find_duplicate_slot(const HostData& data) noexcept;

}  // namespace octavo::contract
