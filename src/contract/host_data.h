// Rules D: the values in the tensors, for devices whose memory the host can read.
#pragma once

#include <span>

#include "octavo/paged_attention.h"

namespace octavo::contract {

class HostData;

// Ok, or the message without the id.
using DataCheck = Status (*)(const HostData& data);

struct DataRule {
  const char* id;
  const char* statement;
  DataCheck check;
};
std::span<const DataRule> data_rules() noexcept;

// Checks lengths, positions, block ids, slots, capacities and scales, and writes nothing. `arguments` must match
// `problem` (match.h). Padding tokens, and table columns that no query sees and no token
// is written to are not looked at: a backend that reads such a column has to treat an id out of range as unmapped.
//
// Cost: O(batch_size + token_count + columns looked at), more where slots do not ascend (duplicate_slots.h). Allocates
// nothing but the message of an error.
// Errors: kInvalidArgument (naming the input, the index and the value).
Status check_host_data(const Problem& problem, const Arguments& arguments) noexcept;

}  // namespace octavo::contract
