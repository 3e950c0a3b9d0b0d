// cpu_avx512_vnni multiplies int8 and int4 codes by fixed point and looks float8 codes up: what that must stand that
// float arithmetic does not mind, and what it must leave as the other backends have it. Where the processor or the
// build has no such backend, the first runs on the others and the second is skipped.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>

#include "backends/harness.h"
#include "support/codecs.h"

namespace octavo::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

std::vector<Case> integer_cases(std::int64_t head_size) {
  std::vector<Case> cases;
  for (const CacheType cache : {CacheType::kInt8, CacheType::kInt4}) {
    for (const QuantType quant : {QuantType::kPerTensor, QuantType::kPerChannel}) {
      Case c;
      c.num_heads = 6;
      c.kv_num_heads = 2;
      c.head_size = head_size;
      c.past = {70};
      c.lse = true;
      c = with_cache(c, cache, quant, cache, quant);
      c.name = std::string(name(cache)) + (quant == QuantType::kPerTensor ? " per tensor" : " per channel");
      cases.push_back(c);
    }
  }
  return cases;
}

// Sets every element of row `token` of the query, all heads.
void set_query(Call& call, std::int64_t token, const std::function<double(std::int64_t channel)>& value) {
  const TensorView& query = call.arguments.query;
  for (std::int64_t i = 0; i < query.shape[1]; ++i) {
    call.set(query, token * query.shape[1] + i, value(i % call.spec().head_size));
  }
}

// Risk: of a latent cache's row, which is key and value, one is multiplied as codes and the other as floats, since only
// one is whole pieces.
TEST(FixedPoint, KeysAsFloatsBesideValuesAsCodes) {
  for (const CacheType cache : {CacheType::kInt8, CacheType::kInt4}) {
    for (const std::int64_t added : {1, 3, 40}) {
      Case spec;
      spec.latent = true;
      spec.kv_num_heads = 1;
      spec.num_heads = 5;
      spec.head_size = cache == CacheType::kInt8 ? 72 : 96;
      spec.v_head_size = 64;
      spec.scale = 0.125f;
      spec.past = {90};
      spec.added = {added};
      spec.lse = true;
      spec = with_cache(spec, cache, QuantType::kPerTensor, CacheType::kTensorType, QuantType::kNone);
      Call call(spec);
      for (const std::string& backend : accepting_backends(call)) {
        EXPECT_TRUE(judge(call, {.backend = backend})) << backend << " " << name(cache) << ", " << added << " tokens";
      }
    }
  }
}

// Risks: a unit that overflows or is 0, a rounding to an integer that does not fit, a row that takes its neighbours
// with it. One token with ordinary numbers stands among extreme ones.
TEST(FixedPoint, StandsExtremeQueries) {
  struct Extreme {
    const char* name;
    std::function<double(std::int64_t)> value;
  };
  const Extreme extremes[] = {
      {"zeros", [](std::int64_t) { return 0.0; }},
      {"subnormals", [](std::int64_t c) { return c % 2 == 0 ? 1e-42 : -3e-45; }},
      {"tiny", [](std::int64_t c) { return c % 3 == 0 ? 2e-33 : -1e-33; }},
      {"huge", [](std::int64_t c) { return c % 2 == 0 ? 3e34 : -3e34; }},
      {"one large, others small", [](std::int64_t c) { return c == 5 ? 1e4 : 1e-4 * static_cast<double>(c); }},
      {"ends of the range", [](std::int64_t c) { return c % 2 == 0 ? 1.0 : -1.0; }},
      {"an infinity", [](std::int64_t c) { return c == 7 ? kInfinity : 1.0; }},
      {"infinities", [](std::int64_t) { return -kInfinity; }},
      {"a NaN", [](std::int64_t c) { return c == 0 ? kNaN : 0.5; }},
  };
  for (const std::int64_t head_size : {32, 64, 96}) {
    for (Case spec : integer_cases(head_size)) {
      for (const std::int64_t added : {1, 3, 9}) {  // few rows, and a tile that does not stream
        spec.added = {added};
        for (const Extreme& extreme : extremes) {
          Call ordinary(spec), call(spec);
          set_query(call, added - 1, extreme.value);
          const Call::Snapshot start = call.snapshot();
          for (const std::string& backend : accepting_backends(call)) {
            call.restore(start);
            EXPECT_TRUE(judge(call, {.backend = backend})) << extreme.name << ", " << added << " tokens";
            run_ok(ordinary, {.backend = backend});
            EXPECT_EQ(output_rows(ordinary, 0, added - 1), output_rows(call, 0, added - 1))
                << backend << " " << spec.name << ": " << extreme.name << " reaches other rows";
          }
        }
      }
    }
  }
}

// Risk: a 32-bit sum that overflows. The longest heads, every code the lowest (largest in magnitude), Q at both ends of
// its pieces, and weights that are all 1.
TEST(FixedPoint, HoldsTheLargestSums) {
  for (const bool latent : {false, true}) {
    for (const CacheType cache : {CacheType::kInt8, CacheType::kInt4}) {
      for (const double q : {1.0, -1.0}) {
        Case spec;
        spec.latent = latent;
        spec.num_heads = 2;
        spec.kv_num_heads = 1;
        spec.head_size = latent ? 1024 : 512;
        spec.v_head_size = latent ? 512 : 0;
        spec.scale = 0.01f;
        spec.past = {200};
        spec.added = {1};
        spec.lse = true;
        spec = with_cache(spec, cache, QuantType::kPerTensor, cache, QuantType::kPerTensor);
        Call call(spec);
        set_query(call, 0, [&](std::int64_t c) { return c == 9 ? -0.999 * q : q; });
        for (std::int64_t position = 0; position < 200; ++position) {
          const std::int64_t slot = call.table_slot(0, position);
          for (std::int64_t c = 0; c < spec.head_size; ++c) {
            const std::uint32_t lowest = cache == CacheType::kInt8 ? 0x80 : 0;
            store_code(cache, call.cache_row(call.arguments.key_cache, slot, 0), c, lowest);
            if (!latent) store_code(cache, call.cache_row(call.arguments.value_cache, slot, 0), c, lowest);
          }
        }
        const Call::Snapshot start = call.snapshot();
        for (const std::string& backend : accepting_backends(call)) {
          call.restore(start);
          EXPECT_TRUE(judge(call, {.backend = backend}));
        }
      }
    }
  }
}

bool has_vnni(const Call& call) {
  const std::vector<std::string> backends = accepting_backends(call);
  return std::find(backends.begin(), backends.end(), "cpu_avx512_vnni") != backends.end();
}

// Rows of codes that fill no whole vectors, and caches of other types, are computed as cpu_avx512 does.
TEST(FixedPoint, LeavesOtherCachesTheirBits) {
  struct Other {
    CacheType cache;
    std::int64_t head_size;
  };
  for (const Other& other :
       {Other{CacheType::kTensorType, 64}, Other{CacheType::kFloat16, 64}, Other{CacheType::kFloat8E4M3FN, 32},
        Other{CacheType::kFloat8E4M3FN, 96}, Other{CacheType::kFloat8E4M3FN, 128}, Other{CacheType::kFloat8E4M3FN, 40},
        Other{CacheType::kFloat4E2M1, 64}, Other{CacheType::kInt8, 40}, Other{CacheType::kInt4, 32}}) {
    for (const std::int64_t group : {1, 2, 3, 4, 7}) {
      Case spec;
      spec.kv_num_heads = 2;
      spec.num_heads = 2 * group;
      spec.head_size = other.head_size;
      spec.past = {300, 5};
      spec.added = {1, 20};
      spec.lse = true;
      const bool quantized = other.cache != CacheType::kTensorType && other.cache != CacheType::kFloat16;
      const QuantType quant = quantized ? QuantType::kPerChannel : QuantType::kNone;
      spec = with_cache(spec, other.cache, quant, other.cache, quant);
      Call call(spec);
      if (!has_vnni(call)) GTEST_SKIP() << "no cpu_avx512_vnni here";
      Call floats(spec);
      run_ok(call, {.backend = "cpu_avx512_vnni"});
      run_ok(floats, {.backend = "cpu_avx512"});
      EXPECT_EQ(first_difference(floats, call, kAllResults), "") << to_string(spec);
    }
  }
}

// A window of one position, so that the output is V itself: every code but NaN comes out as its number.
TEST(Float8Table, HasEveryCode) {
  constexpr CacheType kFloat8 = CacheType::kFloat8E4M3FN;
  Case spec;
  spec.head_size = 256;
  spec.added = {1};
  spec.window = 1;
  spec = with_cache(spec, kFloat8, QuantType::kPerTensor, kFloat8, QuantType::kPerTensor);
  Call call(spec);
  const double scale = call.get(call.arguments.v_scale, 0);
  std::vector<std::uint32_t> codes;
  for (std::uint32_t code = 0; code < code_count(kFloat8); ++code) {
    if (!is_nan(kFloat8, code)) codes.push_back(code);
  }
  ASSERT_EQ(codes.size(), 254u);
  for (std::size_t i = 0; i < codes.size(); ++i) {
    call.set(call.arguments.value, static_cast<std::int64_t>(i), decode(kFloat8, codes[i]) * scale);
  }
  const Call::Snapshot start = call.snapshot();
  for (const std::string& backend : accepting_backends(call)) {
    call.restore(start);
    run_ok(call, {.backend = backend});
    for (std::size_t i = 0; i < codes.size(); ++i) {
      EXPECT_FLOAT_EQ(static_cast<float>(call.get(call.arguments.output, static_cast<std::int64_t>(i))),
                      static_cast<float>(decode(kFloat8, codes[i]) * scale))
          << backend << " code " << codes[i];
    }
  }
}

}  // namespace
}  // namespace octavo::testing
