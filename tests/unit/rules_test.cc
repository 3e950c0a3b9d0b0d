// Every rule of docs/contract.md refuses what it says, with the message that it promises.
// Risk: a rule that is lost, weakened, or answered by another rule's message.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <set>
#include <string>

#include "contract/host_data.h"
#include "contract/match.h"
#include "contract/rules.h"
#include "rule_cases.h"

namespace octavo::test {
namespace {

std::vector<RuleCase> all_cases() {
  std::vector<RuleCase> cases;
  for (const auto& part : {attribute_cases(), mode_cases(), view_cases(), type_cases(), size_cases(), shape_cases(),
                           data_cases(), match_cases()}) {
    cases.insert(cases.end(), part.begin(), part.end());
  }
  return cases;
}

// The Status of the stage that the rule belongs to.
Status status_of(const RuleCase& rule_case, ValidCall& call) {
  Problem problem = call.problem();
  EXPECT_TRUE(contract::check_host_data(problem, call.arguments).ok()) << "the call is to be legal before it is broken";
  rule_case.break_it(call);
  switch (rule_case.id[0]) {
    case 'R': return contract::check_match(problem, call.arguments);
    case 'D': return contract::check_host_data(call.problem(), call.arguments);
    default: return validate(call.arguments, call.attributes, problem);
  }
}

class BrokenRule : public testing::TestWithParam<RuleCase> {};

TEST_P(BrokenRule, IsRefusedWithItsMessage) {
  ValidCall call(GetParam().base);
  const Status status = status_of(GetParam(), call);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), std::string(GetParam().message) + " [" + GetParam().id + "]");
}

// Risk: a session that learns of a bad attribute at its first run only.
TEST(Rules, AttributesAreCheckedWithoutTensors) {
  for (const RuleCase& rule_case : attribute_cases()) {
    ValidCall call(rule_case.base);
    EXPECT_TRUE(validate_attributes(call.attributes).ok());
    rule_case.break_it(call);
    EXPECT_EQ(validate_attributes(call.attributes).message(),
              std::string(rule_case.message) + " [" + rule_case.id + "]");
  }
}

INSTANTIATE_TEST_SUITE_P(Contract, BrokenRule, testing::ValuesIn(all_cases()), [](const auto& test) {
  return std::string(test.param.id) + "_" + std::to_string(test.index);
});

TEST(Rules, EveryIdHasACase) {
  std::set<std::string> covered;
  for (const RuleCase& rule_case : all_cases()) covered.insert(rule_case.id);
  for (const contract::RuleText& rule : contract::all_rules()) {
    EXPECT_TRUE(covered.contains(rule.id)) << rule.id << " has no row in tests/unit/*_cases.cc";
  }
}

TEST(Rules, IdsAreUnique) {
  std::set<std::string> seen;
  for (const contract::RuleText& rule : contract::all_rules()) EXPECT_TRUE(seen.insert(rule.id).second) << rule.id;
}

// Rows of the page look like "| A1 | statement |".
TEST(Rules, PageListsTheSameRules) {
  std::map<std::string, std::string> page;
  std::ifstream file(OCTAVO_CONTRACT_PAGE);
  ASSERT_TRUE(file.is_open()) << OCTAVO_CONTRACT_PAGE;
  for (std::string line; std::getline(file, line);) {
    if (line.size() < 4 || line.substr(0, 2) != "| " || std::string("AMVTZSBDR").find(line[2]) == std::string::npos) {
      continue;
    }
    const std::size_t bar = line.find(" | ");
    if (bar == std::string::npos || line.find_first_not_of("0123456789", 3) != bar || bar == 3) continue;
    const std::size_t end = line.rfind(" |");
    page[line.substr(2, bar - 2)] = line.substr(bar + 3, end - bar - 3);
  }
  std::map<std::string, std::string> code;
  for (const contract::RuleText& rule : contract::all_rules()) code[rule.id] = rule.statement;
  EXPECT_EQ(page, code);
}

}  // namespace
}  // namespace octavo::test
