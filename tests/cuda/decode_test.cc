// The decode backend: a Case for each family of its kernels, with lengths that have several segments and runs, rows
// that need several tiles, and sequences that it leaves to the general attention.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/device_call.h"
#include "support/case.h"

namespace octavo::testing {
namespace {

const char* const kDecode = "cuda_decode";

Case family(const std::string& name, ElementType type, CacheType cache, std::int64_t head_size,
            std::int64_t kv_num_heads, std::int64_t group) {
  Case c;
  if (cache == CacheType::kInt8 || cache == CacheType::kFloat8E4M3FN) {
    c = with_cache(c, cache, QuantType::kPerTensor, cache, QuantType::kPerTensor);
  } else if (cache == CacheType::kInt4) {
    c = with_cache(c, cache, QuantType::kPerChannel, cache, QuantType::kPerChannel);
  }
  c.name = name;
  c.type = type;
  c.head_size = head_size;
  c.kv_num_heads = kv_num_heads;
  c.num_heads = kv_num_heads * group;
  c.lse = true;
  return c;
}

std::vector<Case> families() {
  constexpr ElementType kHalf = ElementType::kFloat16;
  constexpr ElementType kBrain = ElementType::kBFloat16;
  std::vector<Case> list = {
      family("float16_64", kHalf, CacheType::kTensorType, 64, 2, 8),
      family("float16_128", kHalf, CacheType::kTensorType, 128, 2, 4),
      family("bfloat16_96", kBrain, CacheType::kTensorType, 96, 1, 5),
      family("bfloat16_256", kBrain, CacheType::kTensorType, 256, 1, 2),
      family("int8_64_odd_heads", kHalf, CacheType::kInt8, 64, 3, 3),
      family("int8_128_many_rows", kBrain, CacheType::kInt8, 128, 1, 12),
      family("float8_64", kHalf, CacheType::kFloat8E4M3FN, 64, 2, 8),
      family("float8_192", kBrain, CacheType::kFloat8E4M3FN, 192, 1, 3),
      family("int4_64", kHalf, CacheType::kInt4, 64, 3, 7),
      family("int4_128", kBrain, CacheType::kInt4, 128, 2, 4),
      family("int4_256", kHalf, CacheType::kInt4, 256, 1, 1),
      family("float16_128_many_rows", kHalf, CacheType::kTensorType, 128, 1, 17),
      family("int8_256_many_rows", kHalf, CacheType::kInt8, 256, 1, 9),
      family("float8_64_odd_heads", kBrain, CacheType::kFloat8E4M3FN, 64, 3, 5),
      family("int4_128_odd_heads", kHalf, CacheType::kInt4, 128, 3, 6),
  };
  list[1].rotary = Rotary::kHalf;
  list[1].qk_norm = true;
  list[2].window = 700;
  list[5].window = 1500;
  list[5].block_size = 1;
  list[6].softcap = 20.0f;
  list[6].head_sink = true;
  list[7].softcap = 1e5f;
  list[8].rotary = Rotary::kInterleaved;
  list[9].causal = false;
  list[11].window = 333;
  list[12].softcap = 5.0f;
  list[13].head_sink = true;
  return list;
}

std::vector<Case> with_lengths(std::vector<Case> list, const std::vector<std::int64_t>& past,
                               const std::vector<std::int64_t>& added) {
  for (Case& c : list) {
    c.past = past;
    c.added = added;
  }
  return list;
}

std::vector<Case> long_cases() {
  return with_lengths(families(), {2500, 0, 1023, 40, 8300, 300}, {1, 8, 2, 1, 3, 20});
}
// So many runs that they are merged in two levels; of the float16 case so many groups that their nodes need a stack.
std::vector<Case> longest_cases() {
  std::vector<Case> list;
  for (const Case& c : families()) {
    if (c.name == "float16_64" || c.name == "int8_256_many_rows" || c.name == "int4_128") list.push_back(c);
  }
  list = with_lengths(list, {70000, 12}, {3, 1});
  list[0].past[0] = 300000;
  return list;
}
std::vector<Case> short_cases() {
  return with_lengths(families(), {600, 3}, {1, 2});
}

class EveryDecodeKernel : public ::testing::TestWithParam<Case> {};

void expect_oracle(Call& call, Placement placement) {
  const std::vector<std::string> backends = cuda_backends(call);
  ASSERT_NE(std::find(backends.begin(), backends.end(), kDecode), backends.end()) << to_string(call.spec());
  EXPECT_TRUE(judge_on_cuda(call, kDecode, placement));
}

TEST_P(EveryDecodeKernel, AgreesWithTheOracle) {
  Call call(GetParam());
  expect_oracle(call, DeviceCall::default_placement());
}

std::string test_name(const ::testing::TestParamInfo<Case>& info) {
  return info.param.name;
}

INSTANTIATE_TEST_SUITE_P(Short, EveryDecodeKernel, ::testing::ValuesIn(short_cases()), test_name);
INSTANTIATE_TEST_SUITE_P(Long, EveryDecodeKernel, ::testing::ValuesIn(long_cases()), test_name);

class DecodeBits : public ::testing::TestWithParam<Case> {};

std::vector<std::byte> rows(Call& call, std::int64_t begin, std::int64_t end) {
  const auto row = static_cast<std::ptrdiff_t>(call.arguments.output.shape[1] *
                                               static_cast<std::int64_t>(size_in_bytes(call.arguments.output.type)));
  const std::byte* data = call.buffer("output").data();
  return {data + begin * row, data + end * row};
}

// Alone a sequence is cut into many short runs, in a large batch into few: the tree over its segments is the same.
TEST_P(DecodeBits, DoNotDependOnTheBatch) {
  const Case& small = GetParam();
  Case large = small;
  for (int i = 0; i < 40; ++i) {
    large.past.push_back(700 * (i % 5));
    large.added.push_back(1 + i % 3);
  }
  Call together(large);
  run_on_cuda(together, kDecode);
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < small.past.size(); ++i) {
    Case alone = small;
    alone.past = {small.past[i]};
    alone.added = {small.added[i]};
    alone.identities = {static_cast<std::int64_t>(i)};
    Call single(alone);
    run_on_cuda(single, kDecode);
    EXPECT_EQ(rows(single, 0, small.added[i]), rows(together, begin, begin + small.added[i])) << "sequence " << i;
    begin += small.added[i];
  }
}

// Bounds choose kernels for more or fewer rows, and whether the general attention is launched.
TEST_P(DecodeBits, DoNotDependOnMetadata) {
  Case spec = GetParam();
  spec.past.pop_back();  // without the sequence that is not the decode kernel's
  spec.added.pop_back();
  Call absent(spec);
  run_on_cuda(absent, kDecode);
  for (const Metadata metadata : {Metadata::kTight, Metadata::kLoose}) {
    Case bounded = spec;
    bounded.metadata = metadata;
    Call call(bounded);
    run_on_cuda(call, kDecode);
    EXPECT_EQ(first_difference(absent, call, {"output", "lse"}), "") << to_string(bounded);
  }
}

INSTANTIATE_TEST_SUITE_P(Long, DecodeBits, ::testing::ValuesIn(long_cases()), test_name);
INSTANTIATE_TEST_SUITE_P(Longest, DecodeBits, ::testing::ValuesIn(longest_cases()), test_name);

// A bound of one token where a sequence has 20: all of them are the decode kernel's, and all are right.
TEST(DecodeBounds, TooFewTokensAreRightAllTheSame) {
  for (Case spec : families()) {
    spec.past = {700, 30};
    spec.added = {20, 1};
    spec.metadata = Metadata::kTight;
    Call call(spec);
    call.int32_at("attention_metadata", 0) = 1;
    expect_oracle(call, Placement::kAligned);
  }
}

// A bound of 100 keys where there are 3,000, and tables that would have room for more than 2^31.
TEST(DecodeBounds, TooFewKeysAreRightAllTheSame) {
  for (Case spec : families()) {
    spec.past = {3000, 30};
    spec.added = {1, 2};
    spec.metadata = Metadata::kTight;
    Call call(spec);
    call.int32_at("attention_metadata", 1) = 100;
    if (call.arguments.attention_metadata.shape[0] > 2) call.int32_at("attention_metadata", 2) = 0;
    expect_oracle(call, Placement::kAligned);
  }
}

// Scales whose product with the softmax scale rounds to 0: every key has the same weight.
TEST(DecodeScales, TinyOnesForKeysGiveTheAverageOfValues) {
  for (Case spec : families()) {
    if (spec.k_quant == QuantType::kNone) continue;
    spec.past = {100};
    spec.added = {1};
    Call call(spec);
    GuardedBuffer& scale = call.buffer("k_scale");
    auto* const scales = reinterpret_cast<float*>(scale.data());
    std::fill(scales, scales + scale.size() / sizeof(float), 1e-38f);
    expect_oracle(call, Placement::kAligned);
  }
}

}  // namespace
}  // namespace octavo::testing
