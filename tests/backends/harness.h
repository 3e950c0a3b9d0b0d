// What the tests of the backends share: a Case on every backend that takes it, against the oracle.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "octavo/paged_attention.h"
#include "reference/compare.h"
#include "support/call.h"
#include "support/run.h"

namespace octavo::testing {

// Cases with different kernels behind them, for the tests of properties: plain, quantized with everything, windowed,
// four-bit, LATENT.
std::vector<Case> varied_cases();

// The backends of this build and processor that accept `call`. A legal Call that nobody accepts is a test failure.
// Those that do not run on this processor are counted and printed when the tests end; availability_test.cc has a
// skipped test for each.
std::vector<std::string> accepting_backends(const Call& call);

// Runs `call` and compares with the oracle.
::testing::AssertionResult judge(Call& call, const RunSettings& settings);

// Builds `spec`, lets `alter` change it, and expects every backend to agree with the oracle.
void expect_oracle(const Case& spec, const std::function<void(Call&)>& alter = nullptr);

// Runs `call`; a status other than ok is a test failure.
void run_ok(Call& call, const RunSettings& settings);

// Expects every backend to refuse with `code`, to name every one of `words`, and to leave every byte as it was.
void expect_refusal(Call& call, StatusCode code, const std::vector<std::string>& words);

// The outputs and caches, for bit comparisons.
inline const std::vector<std::string> kAllResults = {"output", "output_qk", "lse", "key_cache", "value_cache"};
inline const std::vector<std::string> kOutputs = {"output", "output_qk", "lse"};

// The bytes of the caches, for restore() in the next call.
Call::Snapshot caches_of(Call& call);

// Bits of the output of `spec`.
std::vector<std::byte> output_bits(const Case& spec, const RunSettings& settings);

// The bytes of rows [begin, end) of `output`.
std::vector<std::byte> output_rows(Call& call, std::int64_t begin, std::int64_t end);

}  // namespace octavo::testing
