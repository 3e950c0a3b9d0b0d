// Finding two tokens that would be written to the same slot.
#pragma once

#include <cstdint>
#include <optional>

#include "contract/host_data_reader.h"

namespace octavo::contract {

struct DuplicateSlot {
  std::int64_t slot = 0;
  std::int64_t first_token = 0;
  std::int64_t second_token = 0;
};

// Slots come from slot_mapping, or else from the positions through block_table. Needs the other D rules about lengths,
// ids and slots to hold. Allocates nothing. With r runs of consecutive slots it costs O(token_count) where they ascend,
// else O(token_count + r log r) for every 1,024 of them.
std::optional<DuplicateSlot> find_duplicate_slot(const HostData& data) noexcept;

}  // namespace octavo::contract
