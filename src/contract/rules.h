// The rules of docs/contract.md. A rule is an id that users can look up, a statement, and a check. validate() runs the
// groups in the order below; a check may rely on every rule before it, in its own group and in earlier ones.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "octavo/paged_attention.h"

namespace octavo::contract {

// What a check looks at.
struct Call {
  const Arguments& arguments;
  const Attributes& attributes;
  Problem problem;  // complete from the shape rules on
};

// Empty: the rule holds. Otherwise the message, without the id: input, rule, what it got, what to do.
using Check = std::string (*)(const Call& call);

struct Rule {
  const char* id;
  const char* statement;
  Check check;
};

std::span<const Rule> attribute_rules() noexcept;  // A: attributes by themselves
std::span<const Rule> mode_rules() noexcept;       // M: which tensors go together
std::span<const Rule> view_rules() noexcept;       // V: every tensor by itself: rank, extents, pointer, strides
std::span<const Rule> type_rules() noexcept;       // T: element types and quantization
std::span<const Rule> size_rules() noexcept;       // Z: the tensors that give the sizes
std::span<const Rule> shape_rules() noexcept;      // S: every other tensor against those sizes
std::span<const Rule> bound_rules() noexcept;      // B: attention_metadata

// The Problem of a call that keeps the attribute, mode, view, type and size rules. The bounds are those without
// attention_metadata.
Problem build_problem(const Call& call) noexcept;

// Narrows the launch bounds by attention_metadata, which keeps the bound rules.
void apply_bounds(const Call& call, Problem& problem) noexcept;

// Ids and statements of all rules, those of host_data.h and match.h included: for the documentation and the tests.
struct RuleText {
  const char* id;
  const char* statement;
};
std::vector<RuleText> all_rules();

}  // namespace octavo::contract
