// One row a way to break a rule: the legal call, the one change, and the whole message.
#pragma once

#include <ostream>
#include <vector>

#include "valid_call.h"

namespace octavo::test {

struct RuleCase {
  const char* id;
  ValidCall::Base base;
  void (*break_it)(ValidCall& call);
  const char* message;  // without the trailing " [id]"
};

// How GoogleTest and ctest name a RuleCase: without a printer they show its pointers.
inline void PrintTo(const RuleCase& rule_case, std::ostream* out) {
  *out << rule_case.id;
}

std::vector<RuleCase> attribute_cases();  // A
std::vector<RuleCase> mode_cases();       // M
std::vector<RuleCase> view_cases();       // V
std::vector<RuleCase> type_cases();       // T
std::vector<RuleCase> size_cases();       // Z
std::vector<RuleCase> shape_cases();      // S, B
std::vector<RuleCase> data_cases();       // D: broken before check_host_data(), legal to validate()
std::vector<RuleCase> match_cases();      // R: broken between validate() and run()

}  // namespace octavo::test
