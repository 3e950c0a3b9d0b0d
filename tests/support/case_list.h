// The Cases that every backend runs, as tables, and random ones from a seed.
#pragma once

#include <cstdint>
#include <vector>

#include "support/case.h"

namespace octavo::testing {

// A feature or a storage style: its name, the aspect it decides (two of one aspect exclude each other), what it
// changes.
struct FeatureChoice {
  const char* name;
  const char* aspect;
  void (*apply)(Case& c);
};
const std::vector<FeatureChoice>& feature_choices();

// Whether the contract admits `c` (LATENT takes no sink, a window needs a causal mask, ...).
bool is_legal(const Case& c);

std::vector<Case> single_feature_cases();
std::vector<Case> feature_pair_cases();
std::vector<Case> type_cases();    // every T x K cache x V cache x granularity
std::vector<Case> size_cases();    // head sizes, groups, block sizes
std::vector<Case> length_cases();  // batches, empty sequences, tile edges, long contexts

// A legal Case; every field of Case can vary.
Case random_case(std::uint64_t seed);

}  // namespace octavo::testing
