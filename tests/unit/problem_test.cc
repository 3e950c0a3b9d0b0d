// What validate() makes of legal calls. Risks: a legal call refused, a feature or size lost on the way to the backend,
// undefined behaviour on garbage.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "contract/host_data.h"
#include "contract/match.h"
#include "contract/tensors.h"
#include "valid_call.h"

namespace octavo::test {
namespace {

using Base = ValidCall::Base;
using enum ElementType;

TEST(ProblemTest, PlainCall) {
  ValidCall call(Base::kPlain);
  const Problem problem = call.problem();
  EXPECT_EQ(problem.token_count, 5);
  EXPECT_EQ(problem.batch_size, 2);
  EXPECT_EQ(problem.head_size, 16);
  EXPECT_EQ(problem.v_head_size, 16);
  EXPECT_EQ(problem.num_blocks, 8);
  EXPECT_EQ(problem.block_size, 16);
  EXPECT_EQ(problem.max_blocks_per_sequence, 3);
  EXPECT_EQ(problem.max_query_len_bound, 5);
  EXPECT_EQ(problem.max_kv_len_bound, 48);
  EXPECT_EQ(problem.max_context_len, 48);
  EXPECT_EQ(problem.rotary_dim, 0);
  EXPECT_FLOAT_EQ(problem.scale, 0.25f);
  EXPECT_EQ(problem.k_cache, (CacheFormat{kFloat32, CacheType::kFloat32, QuantType::kNone}));
  EXPECT_TRUE(problem.features.empty()) << to_string(problem.features);
}

TEST(ProblemTest, FeaturesOfEachCall) {
  EXPECT_EQ(
      to_string(ValidCall(Base::kFull).problem().features),
      "slot_mapping, rope, qk_norm, head_sink, softcap, local_window, attention_bias, query_positions, output_qk, "
      "lse");
  EXPECT_EQ(to_string(ValidCall(Base::kPacked).problem().features), "packed_qkv");
  EXPECT_EQ(to_string(ValidCall(Base::kQuantized).problem().features),
            "quantized_cache, per_channel_scale, four_bit_cache");
  EXPECT_EQ(to_string(ValidCall(Base::kLatent).problem().features), "rope, latent");
}

TEST(ProblemTest, PackedAndLatentSizes) {
  EXPECT_EQ(ValidCall(Base::kPacked).problem().head_size, 16);
  const Problem latent = ValidCall(Base::kLatent).problem();
  EXPECT_EQ(latent.head_size, 16);
  EXPECT_EQ(latent.v_head_size, 8);
  EXPECT_EQ(latent.rotary_dim, 8);
  EXPECT_EQ(latent.rotary_offset, 8);
  EXPECT_EQ(latent.rotary_max_positions, 64);
  EXPECT_EQ(latent.scale, 0.5f);
  EXPECT_EQ(latent.v_cache, latent.k_cache);
}

TEST(ProblemTest, QuantizedFormats) {
  const Problem problem = ValidCall(Base::kQuantized).problem();
  EXPECT_EQ(problem.k_cache, (CacheFormat{kInt8, CacheType::kInt8, QuantType::kPerChannel}));
  EXPECT_EQ(problem.v_cache, (CacheFormat{kUint8, CacheType::kInt4, QuantType::kPerTensor}));
}

TEST(ProblemTest, MetadataNarrowsTheBounds) {
  ValidCall call(Base::kFull);
  EXPECT_EQ(call.problem().max_query_len_bound, 3);
  EXPECT_EQ(call.problem().max_kv_len_bound, 40);
  EXPECT_EQ(call.problem().max_context_len, 40);

  call.metadata = {0, 0, 100};  // a lower bound under an unknown upper one
  call.arguments.output_qk = {call.scores.data(), kFloat32, {4, 5, 48}};
  EXPECT_EQ(call.problem().max_query_len_bound, 5);
  EXPECT_EQ(call.problem().max_kv_len_bound, 48);

  call.metadata = {1000, 1000, 0};  // clipped to the static limits
  EXPECT_EQ(call.problem().max_query_len_bound, 5);
  EXPECT_EQ(call.problem().max_context_len, 48);

  call.arguments.attention_metadata = {call.metadata.data(), kInt32, {2}};
  EXPECT_EQ(call.problem().max_kv_len_bound, 48);
}

TEST(ProblemTest, EveryCacheTypeOfTheContract) {
  struct Row {
    ElementType element, cache;
    CacheType dtype;
    QuantType quant;
  };
  const std::vector<Row> rows = {
      {kFloat32, kFloat32, CacheType::kFloat32, QuantType::kNone},
      {kFloat32, kFloat16, CacheType::kTensorType, QuantType::kNone},
      {kFloat32, kBFloat16, CacheType::kBFloat16, QuantType::kNone},
      {kFloat16, kFloat16, CacheType::kFloat16, QuantType::kNone},
      {kBFloat16, kBFloat16, CacheType::kTensorType, QuantType::kNone},
      {kFloat16, kInt8, CacheType::kInt8, QuantType::kPerTensor},
      {kBFloat16, kFloat8E4M3FN, CacheType::kFloat8E4M3FN, QuantType::kPerChannel},
      {kFloat16, kUint8, CacheType::kInt4, QuantType::kPerChannel},
      {kFloat32, kUint8, CacheType::kFloat4E2M1, QuantType::kPerTensor},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(std::string(name(row.element)) + " over " + name(row.cache));
    ValidCall call(Base::kPlain);
    Arguments& a = call.arguments;
    a.query.type = a.key.type = a.value.type = a.output.type = row.element;
    const std::int64_t width = row.cache == kUint8 ? 8 : 16;
    a.key_cache = {call.keys.data(), row.cache, {8, 16, 2, width}};
    a.value_cache = {call.values.data(), row.cache, {8, 16, 2, width}};
    call.attributes.k_cache_dtype = call.attributes.v_cache_dtype = row.dtype;
    call.attributes.k_quant_type = call.attributes.v_quant_type = row.quant;
    if (row.quant == QuantType::kPerTensor) a.k_scale = a.v_scale = {call.scales.data(), kFloat32, {1}};
    if (row.quant == QuantType::kPerChannel) a.k_scale = a.v_scale = {call.scales.data(), kFloat32, {2, 1, 16}};
    const Problem problem = call.problem();
    EXPECT_EQ(problem.k_cache.storage, row.cache);
    EXPECT_EQ(problem.k_cache.quant, row.quant);
    if (row.dtype != CacheType::kTensorType) {
      EXPECT_EQ(problem.k_cache.logical, row.dtype);
    }
    EXPECT_NE(problem.k_cache.logical, CacheType::kTensorType);
  }
}

TEST(ProblemTest, QuantizedLatentRow) {
  ValidCall call(Base::kLatent);
  call.attributes.k_quant_type = QuantType::kPerChannel;
  call.arguments.key_cache = {call.keys.data(), kInt8, {8, 16, 2, 16}};
  call.arguments.k_scale = {call.scales.data(), kFloat32, {2, 1, 16}};
  EXPECT_EQ(call.problem().v_cache.quant, QuantType::kPerChannel);
}

TEST(ProblemTest, EmptyThingsAreLegal) {
  ValidCall no_tokens(Base::kPlain);
  no_tokens.arguments.query = {nullptr, kFloat32, {0, 64}};
  no_tokens.arguments.key = no_tokens.arguments.value = {nullptr, kFloat32, {0, 32}};
  no_tokens.arguments.output = {nullptr, kFloat32, {0, 64}};
  EXPECT_EQ(no_tokens.problem().token_count, 0);

  ValidCall no_blocks(Base::kPlain);
  no_blocks.arguments.key_cache = no_blocks.arguments.value_cache = {nullptr, kFloat32, {0, 16, 2, 16}};
  EXPECT_EQ(no_blocks.problem().num_blocks, 0);
  EXPECT_FALSE(no_blocks.problem().has(Feature::kStridedCache));

  ValidCall no_columns(Base::kPlain);
  no_columns.arguments.block_table = {nullptr, kInt32, {2, 0}};
  EXPECT_EQ(no_columns.problem().max_kv_len_bound, 0);
}

TEST(ProblemTest, StridedCaches) {
  ValidCall call(Base::kPlain);
  std::vector<float> pool(2 * 8 * 16 * 2 * 16);
  call.arguments.key_cache.data = pool.data();

  call.arguments.key_cache.strides = {512, 16, 256, 1};  // head-major
  EXPECT_EQ(to_string(call.problem().features), "strided_cache");

  call.arguments.key_cache.strides = {1024, 64, 16, 1};  // K and V side by side in every slot
  call.arguments.value_cache = call.arguments.key_cache;
  call.arguments.value_cache.data = pool.data() + 32;
  EXPECT_EQ(to_string(call.problem().features), "strided_cache");
  EXPECT_TRUE(contract::check_host_data(call.problem(), call.arguments).ok());

  ValidCall one_block(Base::kPlain);  // the stride of a single block says nothing
  one_block.arguments.key_cache = {one_block.keys.data(), kFloat32, {1, 16, 2, 16}};
  one_block.arguments.value_cache = {one_block.values.data(), kFloat32, {1, 16, 2, 16}};
  one_block.arguments.key_cache.strides[0] = -99;
  EXPECT_TRUE(one_block.problem().features.empty());
}

TEST(ProblemTest, BlockSizesOutsideOnnxAreAFeature) {
  for (const auto& [block_size, small] : {std::pair(16, false), {64, false}, {1, true}, {8, true}, {48, true}}) {
    ValidCall call(Base::kPlain);
    call.arguments.key_cache = {call.keys.data(), kFloat32, {1, block_size, 2, 16}};
    call.arguments.value_cache = {call.values.data(), kFloat32, {1, block_size, 2, 16}};
    EXPECT_EQ(call.problem().has(Feature::kSmallBlocks), small) << block_size;
  }
}

TEST(ProblemTest, OtherFeatures) {
  ValidCall call(Base::kPlain);
  call.widen_indices();
  call.attributes.is_causal = 0;
  EXPECT_EQ(to_string(call.problem().features), "non_causal, int64_indices");
}

TEST(ProblemTest, RotaryCachesAreIgnoredWithoutDoRotary) {
  ValidCall call(Base::kFull);
  call.attributes.do_rotary = 0;
  call.arguments.cos_cache.shape[1] = 3;
  call.arguments.cos_cache.set_contiguous_strides();
  const Problem problem = call.problem();
  EXPECT_FALSE(problem.has(Feature::kRope));
  EXPECT_EQ(problem.rotary_dim, 0);
  EXPECT_TRUE(contract::check_match(problem, call.arguments).ok());
}

TEST(ProblemTest, BroadcastBias) {
  ValidCall call(Base::kFull);
  call.arguments.attention_bias = {call.floats.data(), kFloat32, {1, 4, 7, 100}};
  const Problem problem = call.problem();
  EXPECT_EQ(problem.bias_batch, 1);
  EXPECT_EQ(problem.bias_heads, 4);
  EXPECT_EQ(problem.bias_query_capacity, 7);
  EXPECT_EQ(problem.bias_context_capacity, 100);
}

TEST(ProblemTest, HeadSizeLimits) {
  for (const auto& [layout, head_size] : {std::pair(Base::kPlain, 512), {Base::kLatent, 1024}, {Base::kPlain, 8}}) {
    ValidCall call(layout);
    std::vector<float> large(5 * 4 * 1024);
    call.arguments.query = {large.data(), kFloat32, {5, 4 * head_size}};
    call.arguments.key = {large.data(), kFloat32, {5, 2 * head_size}};
    if (layout == Base::kPlain) {
      call.arguments.value = call.arguments.key;
      call.arguments.value_cache = {large.data(), kFloat32, {0, 16, 2, head_size}};
      call.arguments.output = {large.data(), kFloat32, {5, 4 * head_size}};
    }
    call.arguments.key_cache = {large.data(), kFloat32, {0, 16, 2, head_size}};
    EXPECT_EQ(call.problem().head_size, head_size);
  }
}

TEST(ProblemTest, MatchesItsOwnArguments) {
  for (const Base base : {Base::kPlain, Base::kFull, Base::kPacked, Base::kQuantized, Base::kLatent}) {
    ValidCall call(base);
    const Status status = contract::check_match(call.problem(), call.arguments);
    EXPECT_TRUE(status.ok()) << status.message();
  }
}

TEST(ProblemTest, IsUntouchedByAnError) {
  ValidCall call(Base::kPlain);
  call.attributes.num_heads = 3;
  Problem problem;
  problem.token_count = 77;
  EXPECT_FALSE(validate(call.arguments, call.attributes, problem).ok());
  EXPECT_EQ(problem.token_count, 77);
}

TEST(ProblemTest, NothingIsRefusedByName) {
  Problem problem;
  EXPECT_EQ(validate({}, {}, problem).message(),
            "num_heads: must be 1 to 1048576, got 0; set it to the model's number of query heads [A1]");
}

// Extents, strides, ranks, types and attributes of a legal call replaced at random, several at a time, by values that
// like to overflow. Whatever validate() lets through must be usable: run()'s own check agrees with it.
TEST(ProblemTest, GarbageIsRefusedOrConsistent) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  const std::vector<std::int64_t> odd = {0,       1,         2,    3,        5,         16,        -1,
                                         1 << 20, 1ll << 31, kMax, kMax / 2, -kMax - 1, 1ll << 40, 1ll << 57};
  const auto pick = [&] { return odd[random() % odd.size()]; };
  const auto disturb = [&](auto& view) {
    const auto axis = random() % kMaxRank;
    switch (random() % 6) {
      case 0: view.shape[axis] = pick(); break;
      case 1: view.strides[axis] = pick(); break;
      case 2: view.rank = static_cast<int>(random() % 8) - 1; break;
      case 3: view.type = static_cast<ElementType>(random() % 12); break;
      case 4:
        view.shape[axis] = pick();
        view.set_contiguous_strides();
        break;
      case 5: view = {}; break;
    }
  };
  int accepted = 0;
  for (int round = 0; round < 10000; ++round) {
    ValidCall call(static_cast<Base>(random() % 5));
    Arguments& a = call.arguments;
    const std::vector<TensorView*> inputs = {
        &a.query,         &a.key,         &a.value,           &a.cumulative_sequence_length,
        &a.past_seqlens,  &a.block_table, &a.cos_cache,       &a.sin_cache,
        &a.slot_mapping,  &a.head_sink,   &a.q_norm_weight,   &a.k_scale,
        &a.k_norm_weight, &a.v_scale,     &a.query_positions, &a.attention_bias};
    const std::vector<MutableTensorView*> outputs = {&a.key_cache, &a.value_cache, &a.output, &a.output_qk, &a.lse};
    const std::vector<std::int64_t*> attributes = {
        &call.attributes.num_heads,     &call.attributes.kv_num_heads, &call.attributes.local_window_size,
        &call.attributes.is_causal,     &call.attributes.do_rotary,    &call.attributes.rotary_interleaved,
        &call.attributes.rotary_offset, &call.attributes.v_head_size,  &call.attributes.qk_output};
    for (auto changes = 1 + random() % 3; changes > 0; --changes) {
      switch (random() % 3) {
        case 0: disturb(*inputs[random() % inputs.size()]); break;
        case 1: disturb(*outputs[random() % outputs.size()]); break;
        case 2: *attributes[random() % attributes.size()] = pick(); break;
      }
    }
    Problem problem;
    const Status status = validate(call.arguments, call.attributes, problem);
    if (!status.ok()) {
      ASSERT_EQ(status.code(), StatusCode::kInvalidArgument);
      ASSERT_EQ(status.message().back(), ']') << status.message();
      continue;
    }
    ++accepted;
    const Status match = contract::check_match(problem, call.arguments);
    ASSERT_TRUE(match.ok()) << "round " << round << ": " << match.message();
  }
  EXPECT_GT(accepted, 50);
}

}  // namespace
}  // namespace octavo::test
