// Differential fuzzing: random legal Cases on every backend that takes them, against the oracle, on a random executor.
//   octavo_fuzz_backends [--seconds N] [--seed S] [--backend B]   draws Cases S, S+1, ... for N seconds
//   octavo_fuzz_backends --case S [--backend B]                  runs one again
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "reference/compare.h"
#include "support/call.h"
#include "support/case_list.h"
#include "support/executors.h"
#include "support/random.h"
#include "support/run.h"

namespace octavo::testing {
namespace {

// Runs Case `seed` on all backends, or on `only`; whether all agreed. `runs` counts the runs.
bool run_case(std::uint64_t seed, const std::string& only, std::int64_t& runs) {
  const Case spec = random_case(seed);
  Call call(spec);
  const Acceptance acceptance = ask_backends(call);
  std::string failure;
  if (!acceptance.status.ok()) failure = "validate refuses a legal call: " + acceptance.status.message();
  if (acceptance.status.ok() && acceptance.accepting.empty()) failure = "no backend takes a legal call";
  const Call::Snapshot start = call.snapshot();
  for (const std::string& backend : acceptance.accepting) {
    if (!only.empty() && backend != only) continue;
    call.restore(start);
    Random random(seed + 1);
    const int threads = static_cast<int>(random.between(1, 4));
    std::unique_ptr<Executor> executor = std::make_unique<ReverseExecutor>(threads);
    if (random.chance(0.3)) executor = std::make_unique<ShufflingExecutor>(threads, seed);
    const Status status = run(call, {.backend = backend, .executor = executor.get()});
    ++runs;
    if (!status.ok()) {
      failure = backend + " fails: " + status.message();
    } else if (const Report report =
                   compare(call, start, backend == "cpu_avx512_vnni" ? vnni_arithmetic(call) : Arithmetic{});
               !report.ok()) {
      failure = backend + " differs from the oracle:\n" + report.text();
    }
    if (!failure.empty()) break;
  }
  if (failure.empty()) return true;
  std::printf("FAILED %s\n%s\nagain: octavo_fuzz_backends --case %llu\n", to_string(spec).c_str(), failure.c_str(),
              static_cast<unsigned long long>(seed));
  return false;
}

}  // namespace
}  // namespace octavo::testing

int main(int argc, char** argv) {
  double seconds = 10.0;
  std::uint64_t seed = 1;
  bool single = false;
  std::string backend;
  for (int i = 1; i < argc; i += 2) {
    const bool has_value = i + 1 < argc;
    if (has_value && std::strcmp(argv[i], "--seconds") == 0) {
      seconds = std::strtod(argv[i + 1], nullptr);
    } else if (has_value && std::strcmp(argv[i], "--backend") == 0) {
      backend = argv[i + 1];
    } else if (has_value && (std::strcmp(argv[i], "--seed") == 0 || std::strcmp(argv[i], "--case") == 0)) {
      seed = std::strtoull(argv[i + 1], nullptr, 0);
      single = std::strcmp(argv[i], "--case") == 0;
    } else {
      std::fprintf(stderr, "usage: %s [--seconds N] [--seed S | --case S] [--backend B]\n", argv[0]);
      return 2;
    }
  }
  std::int64_t runs = 0;
  if (single) return octavo::testing::run_case(seed, backend, runs) ? 0 : 1;
  const auto start = std::chrono::steady_clock::now();
  std::uint64_t next = seed;
  while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds) {
    if (!octavo::testing::run_case(next, backend, runs)) return 1;
    ++next;
  }
  std::printf("%lld runs of Cases %llu to %llu agree with the oracle\n", static_cast<long long>(runs),
              static_cast<unsigned long long>(seed), static_cast<unsigned long long>(next) - 1);
  return runs > 0 ? 0 : 1;  // no backend is no agreement
}
