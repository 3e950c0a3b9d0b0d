#include "backends/harness.h"

#include <algorithm>
#include <cstdio>
#include <map>

namespace octavo::testing {
namespace {

// Runs and refusals per backend, printed at the end: a backend that quietly took nothing must be seen.
class Tally : public ::testing::Environment {
 public:
  void TearDown() override {
    for (const auto& [backend, count] : runs) {
      std::printf("[ BACKEND  ] %s: %d calls accepted, largest float32 error %.2f of its bound\n", backend.c_str(),
                  count, worst[backend]);
    }
    for (const auto& [refusal, count] : refusals) {
      std::printf("[ BACKEND  ] refused %d: %s\n", count, refusal.c_str());
    }
  }
  std::map<std::string, int> runs;
  std::map<std::string, double> worst;
  std::map<std::string, int> refusals;
};

Tally& tally() {
  static auto* const instance = static_cast<Tally*>(::testing::AddGlobalTestEnvironment(new Tally));
  return *instance;
}

}  // namespace

std::vector<Case> varied_cases() {
  Case plain;
  plain.name = "plain";
  plain.head_size = 32;
  plain.lse = true;

  Case quantized =
      with_cache(plain, CacheType::kInt8, QuantType::kPerChannel, CacheType::kFloat8E4M3FN, QuantType::kPerTensor);
  quantized.name = "quantized";
  quantized.head_sink = quantized.qk_norm = true;
  quantized.rotary = Rotary::kHalf;
  quantized.softcap = 5.0f;

  Case windowed;
  windowed.name = "windowed";
  windowed.type = ElementType::kBFloat16;
  windowed.window = 37;
  windowed.head_sink = true;
  windowed.bias = BiasShape::kBroadcastBatch;

  Case four_bit =
      with_cache(plain, CacheType::kInt4, QuantType::kPerChannel, CacheType::kFloat4E2M1, QuantType::kPerTensor);
  four_bit.name = "four_bit";
  four_bit.type = ElementType::kFloat16;
  four_bit.packed_qkv = true;

  Case latent;
  latent.name = "latent";
  latent.latent = true;
  latent.num_heads = 6;
  latent.kv_num_heads = 1;
  latent.head_size = 72;
  latent.v_head_size = 64;
  latent.scale = 0.1f;
  return {plain, quantized, windowed, four_bit, latent};
}

std::vector<std::string> accepting_backends(const Call& call) {
  const Acceptance acceptance = ask_backends(call);
  EXPECT_TRUE(acceptance.status.ok()) << acceptance.status.message() << "\n" << to_string(call.spec());
  for (const std::string& refusal : acceptance.refusals) ++tally().refusals[refusal];
  for (const std::string& backend : acceptance.accepting) ++tally().runs[backend];
  EXPECT_FALSE(acceptance.status.ok() && acceptance.accepting.empty())
      << "no backend takes the legal call " << to_string(call.spec());
  return acceptance.accepting;
}

::testing::AssertionResult judge(Call& call, const RunSettings& settings) {
  const Call::Snapshot before = call.snapshot();
  const Status status = run(call, settings);
  if (!status.ok()) {
    return ::testing::AssertionFailure() << settings.backend << " fails: " << status.message() << "\n"
                                         << to_string(call.spec());
  }
  const Arithmetic arithmetic = settings.backend == "cpu_avx512_vnni" ? vnni_arithmetic(call) : Arithmetic{};
  const Report report = compare(call, before, arithmetic);
  double& worst = tally().worst[settings.backend];
  worst = std::max(worst, report.worst);
  if (report.ok()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << settings.backend << " differs from the oracle in " << to_string(call.spec())
                                       << "\n"
                                       << report.text();
}

void expect_oracle(const Case& spec, const std::function<void(Call&)>& alter) {
  Call call(spec);
  if (alter) alter(call);
  const Call::Snapshot start = call.snapshot();
  for (const std::string& backend : accepting_backends(call)) {
    call.restore(start);
    EXPECT_TRUE(judge(call, {.backend = backend}));
  }
}

void run_ok(Call& call, const RunSettings& settings) {
  const Status status = run(call, settings);
  EXPECT_TRUE(status.ok()) << settings.backend << ": " << status.message() << "\n" << to_string(call.spec());
}

void expect_refusal(Call& call, StatusCode code, const std::vector<std::string>& words) {
  // Where validate() already refuses, one run shows it; where the data are at fault, every backend has to.
  const Acceptance acceptance = ask_backends(call);
  std::vector<std::string> backends = acceptance.accepting;
  if (!acceptance.status.ok()) backends = {""};
  EXPECT_FALSE(backends.empty());
  for (const std::string& backend : backends) {
    const Call::Snapshot before = call.snapshot();
    const Status status = run(call, {.backend = backend});
    EXPECT_EQ(static_cast<int>(status.code()), static_cast<int>(code))
        << backend << " says '" << status.message() << "' to " << to_string(call.spec());
    for (const std::string& word : words) {
      EXPECT_NE(status.message().find(word), std::string::npos)
          << backend << " does not name '" << word << "' in '" << status.message() << "'";
    }
    EXPECT_EQ(call.changes_since(before), "") << backend << " wrote although it refused: " << status.message();
    EXPECT_EQ(call.broken_guards(), "");
  }
}

Call::Snapshot caches_of(Call& call) {
  Call::Snapshot caches;
  for (const char* cache : {"key_cache", "value_cache"}) {
    if (call.has_buffer(cache)) caches.emplace(cache, call.buffer(cache).copy());
  }
  return caches;
}

std::vector<std::byte> output_bits(const Case& spec, const RunSettings& settings) {
  Call call(spec);
  run_ok(call, settings);
  return call.buffer("output").copy();
}

std::vector<std::byte> output_rows(Call& call, std::int64_t begin, std::int64_t end) {
  const auto row = static_cast<std::ptrdiff_t>(call.arguments.output.shape[1] *
                                               static_cast<std::int64_t>(size_in_bytes(call.arguments.output.type)));
  const std::byte* data = call.buffer("output").data();
  return {data + begin * row, data + end * row};
}

}  // namespace octavo::testing
