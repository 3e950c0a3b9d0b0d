#include "rule_cases.h"

namespace octavo::test {

std::vector<RuleCase> match_cases() {
  using enum ValidCall::Base;
  using enum ElementType;
  return {
      {"R1", kFull, [](ValidCall& c) { c.arguments.slot_mapping = {}; },
       "slot_mapping: the plan was made for a call with it, got none; a plan serves the calls that validate() reduces "
       "to its Problem, make another one"},
      {"R1", kPlain,
       [](ValidCall& c) {
         c.arguments.lse = {c.results.data(), kFloat32, {4, 5}};
       },
       "lse: the plan was made for a call without it, got one; a plan serves the calls that validate() reduces to its "
       "Problem, make another one"},
      {"R2", kPlain, [](ValidCall& c) { c.arguments.block_table.type = kInt64; },
       "block_table: the plan was made for int32, got int64; a plan serves the calls that validate() reduces to its "
       "Problem, make another one"},
      {"R3", kPlain,
       [](ValidCall& c) {
         c.arguments.key = {c.floats.data(), kFloat32, {4, 32}};
       },
       "key: the plan was made for shape (5, 32), got (4, 32); a plan serves the calls that validate() reduces to its "
       "Problem, make another one"},
      {"R3", kPlain, [](ValidCall& c) { c.arguments.key_cache.rank = 9; },
       "key_cache: the plan was made for shape (8, 16, 2, 16), got (8, 16, 2, 16, ...); a plan serves the calls that "
       "validate() reduces to its Problem, make another one"},
      {"R3", kPlain,
       [](ValidCall& c) {
         c.arguments.past_seqlens = {c.past.data(), kInt32, {1}};
       },
       "past_seqlens: the plan was made for shape (2), got (1); a plan serves the calls that validate() reduces to its "
       "Problem, make another one"},
      {"R4", kPlain, [](ValidCall& c) { c.arguments.output.data = nullptr; },
       "output: has elements, so it needs a data pointer, got null with shape (5, 64); pass its memory, or an extent "
       "of 0"},
      {"R4", kPlain, [](ValidCall& c) { c.arguments.query.strides[1] = 2; },
       "query: must be contiguous, row-major, got shape (5, 64) with strides (64, 2); copy it, only the caches may be "
       "strided"},
      {"R4", kPlain, [](ValidCall& c) { c.arguments.key_cache.strides[0] = 1024; },
       "key_cache: the plan was made for contiguous caches, got a strided one; a plan serves the calls that validate() "
       "reduces to its Problem, make another one"},
  };
}

}  // namespace octavo::test
