#include <exception>

#include "contract/host_data.h"
#include "contract/match.h"
#include "contract/message.h"
#include "contract/rules.h"

namespace octavo {
namespace contract {
namespace {

Status first_broken(std::span<const Rule> rules, const Call& call) {
  for (const Rule& rule : rules) {
    std::string text = rule.check(call);
    if (!text.empty()) return Status::invalid_argument(cat(text, " [", rule.id, "]"));
  }
  return {};
}

Status check_attributes(const Attributes& attributes) {
  const Arguments none;  // the attribute rules look at no tensor
  return first_broken(attribute_rules(), {none, attributes, {}});
}

Status check(const Arguments& arguments, const Attributes& attributes, Problem& problem) {
  Call call{arguments, attributes, {}};
  for (const auto& rules : {attribute_rules(), mode_rules(), view_rules(), type_rules(), size_rules()}) {
    if (Status status = first_broken(rules, call); !status.ok()) return status;
  }
  call.problem = build_problem(call);
  for (const auto& rules : {shape_rules(), bound_rules()}) {
    if (Status status = first_broken(rules, call); !status.ok()) return status;
  }
  apply_bounds(call, call.problem);
  problem = call.problem;
  return {};
}

}  // namespace

std::vector<RuleText> all_rules() {
  std::vector<RuleText> texts;
  for (const auto& rules :
       {attribute_rules(), mode_rules(), view_rules(), type_rules(), size_rules(), shape_rules(), bound_rules()}) {
    for (const Rule& rule : rules) texts.push_back({rule.id, rule.statement});
  }
  for (const DataRule& rule : data_rules()) texts.push_back({rule.id, rule.statement});
  for (const MatchRule& rule : match_rules()) texts.push_back({rule.id, rule.statement});
  return texts;
}

}  // namespace contract

Status validate_attributes(const Attributes& attributes) noexcept {
  try {
    return contract::check_attributes(attributes);
  } catch (const std::exception&) {
    return contract::out_of_memory();
  }
}

Status validate(const Arguments& arguments, const Attributes& attributes, Problem& problem) noexcept {
  try {
    return contract::check(arguments, attributes, problem);
  } catch (const std::exception&) {  // a message that could not be allocated; the checks themselves do not throw
    return contract::out_of_memory();
  }
}

}  // namespace octavo
