// Risk: an oracle that is wrong, or a comparison so lax that a wrong backend passes.
#include "reference/reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "reference/compare.h"
#include "support/call.h"
#include "support/case_list.h"
#include "support/codecs.h"
#include "support/random.h"

namespace octavo::testing {
namespace {

// ---- the oracle is right ----

TEST(Oracle, HandComputedAttention) {
  // One head of 8 channels, two tokens. q.k / sqrt(8) of the second token: 0 and ln 3, so weights 1/4 and 3/4.
  Case spec;
  spec.num_heads = spec.kv_num_heads = 1;
  spec.head_size = 8;
  spec.added = {2};
  spec.lse = true;
  spec.qk_output = 2;
  Call call(spec);
  for (std::int64_t i = 0; i < 16; ++i) {
    call.set(call.arguments.query, i, i == 8 ? std::sqrt(8.0) * std::log(3.0) : 0.0);
    call.set(call.arguments.key, i, i == 8 ? 1.0 : 0.0);
    call.set(call.arguments.value, i, i < 8 ? 4.0 : 8.0);
  }
  reference_run(call.arguments, call.attributes);
  EXPECT_EQ(call.get(call.arguments.output, 0), 4.0);
  EXPECT_NEAR(call.get(call.arguments.output, 8), 7.0, 1e-6);
  EXPECT_NEAR(call.get(call.arguments.lse, 0), 0.0, 1e-6);
  EXPECT_NEAR(call.get(call.arguments.lse, 1), std::log(4.0), 1e-6);
  const std::int64_t context = call.arguments.output_qk.shape[2];
  EXPECT_NEAR(call.get(call.arguments.output_qk, context), 0.25, 1e-6);
  EXPECT_NEAR(call.get(call.arguments.output_qk, context + 1), 0.75, 1e-6);
  EXPECT_EQ(call.get(call.arguments.output_qk, 1), 0.0);  // the first token does not see the second
}

TEST(Oracle, HandComputedSinkSoftcapAndBias) {
  // One token, one position. Score ln 3 before the cap; with the sink at 0 its weight is s / (s + 1).
  Case spec;
  spec.num_heads = spec.kv_num_heads = 1;
  spec.head_size = 8;
  spec.added = {1};
  spec.head_sink = true;
  spec.bias = BiasShape::kFull;
  spec.softcap = 2.0f;
  spec.lse = true;
  Call call(spec);
  for (std::int64_t i = 0; i < 8; ++i) {
    call.set(call.arguments.query, i, i == 0 ? std::sqrt(8.0) * std::log(3.0) : 0.0);
    call.set(call.arguments.key, i, 1.0);
    call.set(call.arguments.value, i, 10.0);
  }
  call.set(call.arguments.head_sink, 0, 0.0);
  call.set(call.arguments.attention_bias, 0, 0.5);
  reference_run(call.arguments, call.attributes);
  const double score = 2.0 * std::tanh(std::log(3.0) / 2.0) + 0.5;  // tanh(ln 3 / 2) = 1/2, so 1.5
  EXPECT_NEAR(score, 1.5, 1e-12);
  EXPECT_NEAR(call.get(call.arguments.lse, 0), 1.5, 1e-6);
  EXPECT_NEAR(call.get(call.arguments.output, 0), 10.0 * std::exp(1.5) / (std::exp(1.5) + 1.0), 1e-5);
}

TEST(Oracle, HandComputedNormAndRotation) {
  Case spec;
  spec.num_heads = spec.kv_num_heads = 1;
  spec.head_size = 8;
  spec.past = {1};
  spec.added = {1};
  spec.qk_norm = true;
  spec.rotary = Rotary::kHalf;
  Call call(spec);
  for (std::int64_t i = 0; i < 8; ++i) {
    call.set(call.arguments.key, i, i == 0 ? 4.0 : 0.0);
    call.set(call.arguments.k_norm_weight, i, 2.0);
  }
  for (std::int64_t i = 0; i < 4; ++i) {  // the row of position 1
    call.set(call.arguments.cos_cache, 4 + i, 0.6);
    call.set(call.arguments.sin_cache, 4 + i, 0.8);
  }
  call.attributes.qk_norm_epsilon = 1e-6f;
  const double normalised = 2.0 * 4.0 / std::sqrt(16.0 / 8.0 + 1e-6);
  Prologue p = reference_prologue(call.arguments, call.attributes);
  EXPECT_NEAR(p.key[0], 0.6 * normalised, 1e-6);
  EXPECT_NEAR(p.key[4], 0.8 * normalised, 1e-6);
  call.attributes.rotary_interleaved = 1;
  p = reference_prologue(call.arguments, call.attributes);
  EXPECT_NEAR(p.key[0], 0.6 * normalised, 1e-6);
  EXPECT_NEAR(p.key[1], 0.8 * normalised, 1e-6);
}

TEST(Oracle, EqualsDenseSoftmaxWithoutPages) {
  // A second implementation that knows no pages: whole prompts, one sequence, causal.
  Case spec;
  spec.added = {23};
  spec.block_size = 4;
  Call call(spec);
  reference_run(call.arguments, call.attributes);
  const std::int64_t width = spec.head_size, heads = spec.num_heads, kv_heads = spec.kv_num_heads;
  for (std::int64_t t = 0; t < 23; ++t) {
    for (std::int64_t h = 0; h < heads; ++h) {
      std::vector<double> weight;
      double sum = 0.0;
      for (std::int64_t k = 0; k <= t; ++k) {
        double dot = 0.0;
        for (std::int64_t c = 0; c < width; ++c) {
          dot += call.get(call.arguments.query, (t * heads + h) * width + c) *
                 call.get(call.arguments.key, (k * kv_heads + h / 2) * width + c);
        }
        weight.push_back(std::exp(dot / 4.0));
        sum += weight.back();
      }
      for (std::int64_t c = 0; c < width; ++c) {
        double want = 0.0;
        for (std::int64_t k = 0; k <= t; ++k) {
          want += weight[static_cast<std::size_t>(k)] / sum *
                  call.get(call.arguments.value, (k * kv_heads + h / 2) * width + c);
        }
        ASSERT_NEAR(call.get(call.arguments.output, (t * heads + h) * width + c), want, 1e-6) << t << " " << h;
      }
    }
  }
}

TEST(Oracle, AbsorbedLatentEqualsDecompressedHeads) {
  // q . (W_uk c) = (W_uk^T q) . c and sum p (W_uv c) = W_uv (sum p c): the operator's LATENT mode on absorbed queries
  // is multi-head attention over decompressed K and V. Rank 16, 4 rotary channels left as they are, heads of 12 and 8.
  constexpr std::int64_t kRank = 16, kRope = 8, kNope = 12, kValue = 8, kHeads = 3, kTokens = 9;
  Case spec;
  spec.latent = true;
  spec.num_heads = kHeads;
  spec.kv_num_heads = 1;
  spec.head_size = kRank + kRope;
  spec.v_head_size = kRank;
  spec.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(kNope + kRope)));
  spec.added = {kTokens};
  Call call(spec);
  const auto w_uk = [](std::int64_t h, std::int64_t i, std::int64_t r) { return 0.3 * normal(hash(1, {h, i, r})); };
  const auto w_uv = [](std::int64_t h, std::int64_t i, std::int64_t r) { return 0.3 * normal(hash(2, {h, i, r})); };
  const auto q_nope = [](std::int64_t t, std::int64_t h, std::int64_t i) { return normal(hash(3, {t, h, i})); };
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (std::int64_t h = 0; h < kHeads; ++h) {
      for (std::int64_t r = 0; r < kRank; ++r) {
        double absorbed = 0.0;
        for (std::int64_t i = 0; i < kNope; ++i) absorbed += w_uk(h, i, r) * q_nope(t, h, i);
        call.set(call.arguments.query, (t * kHeads + h) * spec.head_size + r, absorbed);
      }
    }
  }
  reference_run(call.arguments, call.attributes);
  const auto latent = [&](std::int64_t t, std::int64_t r) {
    return call.get(call.arguments.key, t * spec.head_size + r);
  };
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (std::int64_t h = 0; h < kHeads; ++h) {
      std::vector<double> weight;
      double sum = 0.0;
      for (std::int64_t k = 0; k <= t; ++k) {
        double dot = 0.0;
        for (std::int64_t i = 0; i < kNope; ++i) {
          double key = 0.0;
          for (std::int64_t r = 0; r < kRank; ++r) key += w_uk(h, i, r) * latent(k, r);
          dot += q_nope(t, h, i) * key;
        }
        for (std::int64_t i = kRank; i < kRank + kRope; ++i) {
          dot += call.get(call.arguments.query, (t * kHeads + h) * spec.head_size + i) * latent(k, i);
        }
        weight.push_back(std::exp(static_cast<double>(spec.scale) * dot));
        sum += weight.back();
      }
      for (std::int64_t i = 0; i < kValue; ++i) {
        double want = 0.0, got = 0.0;
        for (std::int64_t r = 0; r < kRank; ++r) {
          got += w_uv(h, i, r) * call.get(call.arguments.output, (t * kHeads + h) * kRank + r);
          for (std::int64_t k = 0; k <= t; ++k) {
            want += weight[static_cast<std::size_t>(k)] / sum * w_uv(h, i, r) * latent(k, r);
          }
        }
        ASSERT_NEAR(got, want, 1e-5) << "token " << t << " head " << h;
      }
    }
  }
}

// ---- the comparison accepts what is right ----

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const auto& list : {single_feature_cases(), feature_pair_cases(), type_cases(), size_cases(), length_cases()}) {
    cases.insert(cases.end(), list.begin(), list.end());
  }
  return cases;
}

TEST(Comparison, AcceptsTheOracleItself) {
  for (const Case& spec : single_feature_cases()) {
    Call call(spec);
    const Call::Snapshot before = call.snapshot();
    reference_run(call.arguments, call.attributes);
    const Report report = compare(call, before);
    ASSERT_TRUE(report.ok()) << to_string(spec) << "\n" << report.text();
  }
}

TEST(Comparison, BoundsAreThoseOfSinglePrecision) {
  // The same loops in float32 stay inside of the bounds in every Case, and not by much: at least one comes within a
  // factor of four, else the bounds would hide small faults.
  double worst = 0.0;
  for (const Case& spec : all_cases()) {
    if (spec.batch_size() > 100) continue;
    Call call(spec);
    const Call::Snapshot before = call.snapshot();
    reference_run(call.arguments, call.attributes, Deviation::kSinglePrecision);
    const Report report = compare(call, before);
    ASSERT_TRUE(report.ok()) << to_string(spec) << "\n" << report.text();
    worst = std::max(worst, report.worst);
  }
  EXPECT_GT(worst, 0.25);
  RecordProperty("worst_error_in_bounds", std::to_string(worst));
}

// ---- the comparison refuses what is wrong ----

struct Mistake {
  const char* name;
  std::function<void(Case&)> setup;                               // a Case that shows it
  std::function<void(Arguments&, Attributes&)> change = nullptr;  // what the faulty backend computes instead
  Deviation deviation = Deviation::kNone;
};

std::vector<Mistake> mistakes() {
  return {
      {"sink dropped", [](Case& c) { c.head_sink = true; }, [](Arguments& a, Attributes&) { a.head_sink = {}; }},
      {"sink dropped, int8 cache",
       [](Case& c) {
         c.head_sink = true;
         c = with_cache(c, CacheType::kInt8, QuantType::kPerTensor, CacheType::kInt8, QuantType::kPerTensor);
       },
       [](Arguments& a, Attributes&) { a.head_sink = {}; }},
      {"sink weighs a value", [](Case& c) { c.head_sink = true; }, nullptr, Deviation::kSinkInWeightedSum},
      {"window one too small", [](Case& c) { c.window = 9; },
       [](Arguments&, Attributes& a) { a.local_window_size -= 1; }},
      {"window one too large", [](Case& c) { c.window = 9; },
       [](Arguments&, Attributes& a) { a.local_window_size += 1; }},
      {"window ignored", [](Case& c) { c.window = 30; }, [](Arguments&, Attributes& a) { a.local_window_size = -1; }},
      {"softcap missing", [](Case& c) { c.softcap = 20.0f; }, [](Arguments&, Attributes& a) { a.softcap = 0.0f; }},
      {"softcap after the bias",
       [](Case& c) {
         c.softcap = 20.0f;
         c.bias = BiasShape::kFull;
       },
       nullptr, Deviation::kBiasBeforeSoftcap},
      {"bias missing", [](Case& c) { c.bias = BiasShape::kBroadcastBoth; },
       [](Arguments& a, Attributes&) { a.attention_bias = {}; }},
      {"causal mask missing", [](Case&) {}, [](Arguments&, Attributes& a) { a.is_causal = 0; }},
      {"causal mask where none is asked for", [](Case& c) { c.causal = false; },
       [](Arguments&, Attributes& a) { a.is_causal = 1; }},
      {"the token itself left out", [](Case&) {}, nullptr, Deviation::kNewestKeyMissing},
      {"unmapped position counted as a zero key",
       [](Case& c) {
         c.block_size = 4;
         c.unmapped_holes = 1;
       },
       nullptr, Deviation::kUnmappedReadsAsZero},
      {"scale ignored", [](Case& c) { c.scale = 0.26f; }, [](Arguments&, Attributes& a) { a.scale = 0.0f; }},
      {"query_positions ignored by the mask", [](Case& c) { c.positions = Positions::kTree; },
       [](Arguments& a, Attributes&) { a.query_positions = {}; }},
      {"rotation missing", [](Case& c) { c.rotary = Rotary::kHalf; },
       [](Arguments&, Attributes& a) { a.do_rotary = 0; }},
      {"rotation of the wrong pairs", [](Case& c) { c.rotary = Rotary::kHalf; },
       [](Arguments&, Attributes& a) { a.rotary_interleaved = 1; }},
      {"rotation offset ignored",
       [](Case& c) {
         c.rotary = Rotary::kHalf;
         c.rotary_offset = 8;
         c.rotary_dim = 8;
       },
       [](Arguments&, Attributes& a) { a.rotary_offset = 0; }},
      {"norm missing", [](Case& c) { c.qk_norm = true; },
       [](Arguments& a, Attributes&) { a.q_norm_weight = a.k_norm_weight = {}; }},
      {"norm weights swapped", [](Case& c) { c.qk_norm = true; },
       [](Arguments& a, Attributes&) { std::swap(a.q_norm_weight, a.k_norm_weight); }},
      {"K and V scales swapped",
       [](Case& c) {
         c = with_cache(c, CacheType::kInt8, QuantType::kPerChannel, CacheType::kInt8, QuantType::kPerChannel);
       },
       [](Arguments& a, Attributes&) { std::swap(a.k_scale, a.v_scale); }},
      {"LATENT value from the wrong end",
       [](Case& c) {
         c.latent = true;
         c.kv_num_heads = 1;
         c.head_size = 24;
         c.v_head_size = 16;
         c.scale = 0.2f;
       },
       nullptr, Deviation::kValueFromTrailing},
      {"slot_mapping ignored", [](Case& c) { c.slots = SlotStyle::kElsewhere; },
       [](Arguments& a, Attributes&) { a.slot_mapping = {}; }},
  };
}

TEST(Comparison, RefusesEveryMistake) {
  for (const Mistake& mistake : mistakes()) {
    for (const ElementType type : {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16}) {
      Case spec;
      spec.past = {0, 19, 40};
      spec.added = {12, 1, 5};
      spec.type = type;
      mistake.setup(spec);
      Call call(spec);
      const Call::Snapshot before = call.snapshot();
      const Arguments right_arguments = call.arguments;
      const Attributes right_attributes = call.attributes;
      if (mistake.change) mistake.change(call.arguments, call.attributes);
      reference_run(call.arguments, call.attributes, mistake.deviation);
      call.arguments = right_arguments;
      call.attributes = right_attributes;
      const Report report = compare(call, before);
      EXPECT_FALSE(report.ok()) << mistake.name << " passed: " << to_string(spec);
    }
  }
}

TEST(Comparison, RefusesAStrayByteInACache) {
  for (const char* cache : {"key_cache", "value_cache"}) {
    Case spec;
    spec.past = {3};
    Call call(spec);
    const Call::Snapshot before = call.snapshot();
    reference_run(call.arguments, call.attributes);
    call.buffer(cache).data()[call.buffer(cache).size() - 1] ^= std::byte{1};
    EXPECT_FALSE(compare(call, before).ok()) << cache;
  }
}

TEST(Comparison, RefusesAWriteOutsideOfATensor) {
  Call call(Case{});
  const Call::Snapshot before = call.snapshot();
  reference_run(call.arguments, call.attributes);
  EXPECT_TRUE(compare(call, before).ok());
#if !defined(__SANITIZE_ADDRESS__)
  call.buffer("output").data()[call.buffer("output").size()] = std::byte{0};
  EXPECT_FALSE(compare(call, before).ok());
#endif
}

TEST(Comparison, RefusesACodeAwayFromTheBoundary) {
  Case spec = with_cache(Case{}, CacheType::kInt8, QuantType::kPerTensor, CacheType::kInt8, QuantType::kPerTensor);
  spec.rotary = Rotary::kHalf;
  Call call(spec);
  const Call::Snapshot before = call.snapshot();
  reference_run(call.arguments, call.attributes);
  const Prologue prologue = reference_prologue(call.arguments, call.attributes);
  std::byte* row = cache_row(call.arguments.key_cache, prologue.slot[2], 0);
  row[0] = static_cast<std::byte>(static_cast<unsigned char>(row[0]) + 1);
  EXPECT_FALSE(compare(call, before).ok());
}

TEST(Comparison, RefusesAnUnwrittenOutput) {
  Call call(Case{});
  const Call::Snapshot before = call.snapshot();
  reference_run(call.arguments, call.attributes);
  call.poison_outputs();
  EXPECT_FALSE(compare(call, before).ok());
}

}  // namespace
}  // namespace octavo::testing
