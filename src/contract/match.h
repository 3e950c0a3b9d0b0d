// Rules R: what run() is given is what its Plan was made for, so that nothing is accessed out of bounds.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "octavo/paged_attention.h"

namespace octavo::contract {

using MatchCheck = std::string (*)(const Problem& problem, const Arguments& arguments);

struct MatchRule {
  const char* id;
  const char* statement;
  MatchCheck check;
};
std::span<const MatchRule> match_rules() noexcept;

// Presence, types, shapes, pointers and strides of all tensors against `problem`. Reads no tensor data.
// Errors: kInvalidArgument.
Status check_match(const Problem& problem, const Arguments& arguments) noexcept;

}  // namespace octavo::contract
