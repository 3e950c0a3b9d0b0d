// What the D rules must leave alone, and the search for duplicate slots. Risks: a legal call of a real engine (padding,
// evicted blocks, rings, shared prefixes) refused; a duplicate that goes unseen.
#include "contract/host_data.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "contract/duplicate_slots.h"
#include "valid_call.h"

namespace octavo::test {
namespace {

using Base = ValidCall::Base;
constexpr std::int32_t kWild = 1'000'000;

Status check(ValidCall& call) {
  return contract::check_host_data(call.problem(), call.arguments);
}

TEST(HostData, PaddingTokensMayHoldAnything) {
  ValidCall call(Base::kFull);
  call.offsets[2] = 3;  // the last two tokens are padding, and sequence 1 is empty
  call.slots[3] = kWild;
  call.slots[4] = -7;
  call.positions[3] = -1;
  call.positions[4] = kWild;
  EXPECT_TRUE(check(call).ok()) << check(call).message();
}

TEST(HostData, ColumnsPastTheLengthAreNotLookedAt) {
  ValidCall call(Base::kPlain);
  call.table = {5, kWild, -9, 7, kWild, kWild};
  EXPECT_TRUE(check(call).ok()) << check(call).message();
  call.past[0] = 13;  // length 16 still is one column
  EXPECT_TRUE(check(call).ok()) << check(call).message();
  call.past[0] = 14;
  EXPECT_EQ(check(call).message(),
            "block_table[0, 1]: must be a block id below num_blocks = 8 or -1 (unmapped), got 1000000; give the column "
            "a block of the cache [D8]");
}

TEST(HostData, TableOfASequenceWithoutNewTokensIsNotLookedAt) {
  ValidCall call(Base::kPlain);
  call.offsets = {0, 0, 2};
  call.past[0] = 40;
  call.table = {kWild, kWild, kWild, 7, -1, -1};
  EXPECT_TRUE(check(call).ok()) << check(call).message();
}

// A query at position 40 with a window of W sees 41 - W to 40.
TEST(HostData, ColumnsLeftOfTheWindowAreNotLookedAt) {
  ValidCall call(Base::kPlain);
  call.past[0] = 40;
  call.offsets = {0, 1, 1};
  call.table[0] = call.table[1] = kWild;
  call.attributes.local_window_size = 9;
  EXPECT_TRUE(check(call).ok()) << check(call).message();
  call.attributes.local_window_size = 10;
  EXPECT_EQ(check(call).message().substr(0, 17), "block_table[0, 1]");
  call.table[1] = 3;
  EXPECT_TRUE(check(call).ok()) << check(call).message();
  call.attributes.local_window_size = 26;
  EXPECT_EQ(check(call).message().substr(0, 17), "block_table[0, 0]");
}

TEST(HostData, QueriesWithoutCausalMaskSeeEveryColumn) {
  ValidCall call(Base::kPlain);
  call.past[0] = 40;
  call.attributes.is_causal = 0;
  call.table = {kWild, 2, 3, 7, -1, -1};
  EXPECT_EQ(check(call).message().substr(0, 17), "block_table[0, 0]");
}

class QueryPositions : public testing::Test {
 protected:
  QueryPositions() : call(Base::kFull) {
    call.past = {42, 0};
    call.attributes.do_rotary = 0;
    call.attributes.local_window_size = 4;
    call.metadata = {0, 0, 0};
    call.arguments.output_qk = {call.scores.data(), ElementType::kFloat32, {4, 5, 48}};
    call.table = {5, kWild, 3, 7, -1, -1};
  }
  ValidCall call;
};

TEST_F(QueryPositions, ColumnsBetweenTheWindowsAreNotLookedAt) {
  call.positions = {5, 44, 6, 0, 1};  // columns 0 and 2
  EXPECT_TRUE(check(call).ok()) << check(call).message();
  call.positions = {5, 44, 34, 0, 1};  // 34 sees 31, in column 1
  EXPECT_EQ(check(call).message().substr(0, 17), "block_table[0, 1]");
  call.positions = {5, 44, 20, 0, 1};
  EXPECT_EQ(check(call).message().substr(0, 17), "block_table[0, 1]");
}

TEST_F(QueryPositions, ColumnsWrittenByPositionAreLookedAt) {
  call.positions = {5, 5, 6, 0, 1};
  call.table = {5, 4, kWild, 7, -1, -1};
  EXPECT_TRUE(check(call).ok()) << check(call).message();
  call.arguments.slot_mapping = {};
  EXPECT_EQ(check(call).message().substr(0, 17), "block_table[0, 2]");
}

TEST_F(QueryPositions, ColumnsRightOfEveryPositionAreNotLookedAt) {
  call.attributes.local_window_size = -1;
  call.positions = {5, 15, 0, 0, 1};
  EXPECT_TRUE(check(call).ok()) << check(call).message();
  call.positions = {5, 16, 0, 0, 1};
  EXPECT_EQ(check(call).message().substr(0, 17), "block_table[0, 1]");
}

TEST(HostData, SharedPrefixesAndRingsAreLegal) {
  ValidCall call(Base::kPlain);
  call.past = {32, 32};
  call.table = {5, 5, 3, 5, 5, 4};  // a ring's repeated id, shared by both sequences, read only
  EXPECT_TRUE(check(call).ok()) << check(call).message();
}

TEST(HostData, EmptyBatchAndEmptyTableAreLegal) {
  ValidCall call(Base::kPlain);
  call.offsets = {0};
  call.arguments.cumulative_sequence_length = {call.offsets.data(), ElementType::kInt32, {1}};
  call.arguments.past_seqlens = {nullptr, ElementType::kInt32, {0}};
  call.arguments.block_table = {nullptr, ElementType::kInt32, {0, 3}};
  EXPECT_TRUE(check(call).ok()) << check(call).message();

  ValidCall tableless(Base::kPlain);
  tableless.offsets = {0, 0, 0};
  tableless.past = {0, 0};
  tableless.arguments.block_table = {nullptr, ElementType::kInt32, {2, 0}};
  EXPECT_TRUE(check(tableless).ok()) << check(tableless).message();
  tableless.offsets = {0, 1, 1};
  EXPECT_EQ(check(tableless).message().substr(0, 15), "past_seqlens[0]");
}

TEST(HostData, WideIndicesAreReadWhole) {
  ValidCall call(Base::kFull);
  call.widen_indices();
  EXPECT_TRUE(check(call).ok()) << check(call).message();
  call.wide[6] = (std::int64_t{1} << 32) + 84;
  EXPECT_EQ(check(call).message(),
            "slot_mapping[0]: must be below num_blocks * block_size = 128 or -1 (do not write), got 4294967380; a slot "
            "is block * block_size + offset [D9]");
}

// Against the plain search, with few slots so that about half of the lists have a duplicate, in lists whose runs fit
// the stack and lists whose runs do not.
TEST(DuplicateSlots, AgreesWithThePlainSearch) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  int large_with = 0;
  int large_without = 0;
  for (int round = 0; round < 240; ++round) {
    const bool large = round % 4 == 0;
    const std::int64_t tokens = large ? 6000 : 12;
    const std::int64_t slot_count = tokens * tokens / 4;
    std::vector<std::int64_t> slots(static_cast<std::size_t>(tokens));
    std::int64_t next = 0;
    for (std::int64_t& slot : slots) {
      const auto dice = random() % 4;
      next = dice == 0 ? static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(slot_count)) : next + 1;
      slot = dice == 1 ? -1 : next % slot_count;
    }
    const std::vector<std::int32_t> offsets{0, static_cast<std::int32_t>(tokens / 3),
                                            static_cast<std::int32_t>(tokens)};
    const std::vector<std::int32_t> past{0, 0};
    Problem problem;
    problem.batch_size = 2;
    problem.token_count = tokens;
    problem.block_size = 16;
    problem.index_type = ElementType::kInt64;
    problem.features = Feature::kSlotMapping;
    Arguments arguments;
    arguments.cumulative_sequence_length = {offsets.data(), ElementType::kInt32, {3}};
    arguments.past_seqlens = {past.data(), ElementType::kInt32, {2}};
    arguments.slot_mapping = {slots.data(), ElementType::kInt64, {tokens}};
    const auto found = contract::find_duplicate_slot(contract::HostData(problem, arguments));

    bool expected = false;
    std::map<std::int64_t, std::int64_t> owner;
    for (const std::int64_t slot : slots) expected = expected || (slot >= 0 && ++owner[slot] > 1);
    ASSERT_EQ(found.has_value(), expected) << "round " << round;
    if (large) ++(expected ? large_with : large_without);
    if (!expected) continue;
    EXPECT_LT(found->first_token, found->second_token);
    EXPECT_EQ(slots[static_cast<std::size_t>(found->first_token)], found->slot);
    EXPECT_EQ(slots[static_cast<std::size_t>(found->second_token)], found->slot);
  }
  EXPECT_GT(large_with, 0);
  EXPECT_GT(large_without, 0);
}

}  // namespace
}  // namespace octavo::test
