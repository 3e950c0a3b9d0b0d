// Risk: bad data that a CPU can see must give a clear error, and not a single byte may have been written by then.
#include <gtest/gtest.h>

#include "backends/harness.h"
#include "support/case_list.h"

namespace octavo::testing {
namespace {

Case base() {
  Case c;
  c.past = {20, 0, 5};
  c.added = {3, 9, 1};
  c.index_type = ElementType::kInt64;
  c.hostile = true;
  return c;
}

TEST(Refusal, FirstOffsetNotZero) {
  Call call(base());
  call.int32_at("cumulative_sequence_length", 0) = 1;
  expect_refusal(call, StatusCode::kInvalidArgument, {"cumulative_sequence_length", "1"});
}

TEST(Refusal, LengthsThatFall) {
  Call call(base());
  call.int32_at("cumulative_sequence_length", 2) = 2;
  expect_refusal(call, StatusCode::kInvalidArgument, {"cumulative_sequence_length[2]", "2"});
}

TEST(Refusal, MoreTokensThanQueryHas) {
  Call call(base());
  call.int32_at("cumulative_sequence_length", 3) = 14;
  expect_refusal(call, StatusCode::kInvalidArgument, {"cumulative_sequence_length[3]", "14", "13"});
}

TEST(Refusal, NegativePast) {
  Call call(base());
  call.int32_at("past_seqlens", 1) = -4;
  expect_refusal(call, StatusCode::kInvalidArgument, {"past_seqlens[1]", "-4"});
}

TEST(Refusal, PastBeyondTheTable) {
  Call call(base());
  call.int32_at("past_seqlens", 0) = 1 << 20;
  expect_refusal(call, StatusCode::kInvalidArgument, {"past_seqlens[0]", "1048576"});
  call.int32_at("past_seqlens", 0) = 2147483647;  // past + new overflows 32 bits
  expect_refusal(call, StatusCode::kInvalidArgument, {"past_seqlens[0]", "2147483647"});
}

TEST(Refusal, BlockIdsOutsideOfThePool) {
  for (const std::int64_t id : {std::int64_t{-2}, std::int64_t{-7}, std::int64_t{1} << 30, std::int64_t{1} << 40}) {
    Call call(base());
    call.set_table(0, 1, id);
    expect_refusal(call, StatusCode::kInvalidArgument, {"block_table[0, 1]", std::to_string(id)});
  }
  Call call(base());
  const std::int64_t num_blocks = call.arguments.key_cache.shape[0];
  call.set_table(2, 0, num_blocks);
  expect_refusal(call, StatusCode::kInvalidArgument, {"block_table[2, 0]", std::to_string(num_blocks)});
}

TEST(Refusal, SlotsOutsideOfThePool) {
  Case spec = base();
  spec.slots = SlotStyle::kDerived;
  for (const std::int64_t slot : {std::int64_t{-2}, std::int64_t{1} << 33}) {
    Call call(spec);
    call.set_slot(4, slot);
    expect_refusal(call, StatusCode::kInvalidArgument, {"slot_mapping[4]", std::to_string(slot)});
  }
  Call call(spec);
  const std::int64_t slots = call.arguments.key_cache.shape[0] * spec.block_size;
  call.set_slot(12, slots);
  expect_refusal(call, StatusCode::kInvalidArgument, {"slot_mapping[12]", std::to_string(slots)});
}

TEST(Refusal, PositionsWithoutRotation) {
  Case spec = base();
  spec.rotary = Rotary::kHalf;
  {
    Call call(spec);  // one row too few
    call.arguments.cos_cache.shape[0] = call.arguments.sin_cache.shape[0] = 22;
    expect_refusal(call, StatusCode::kInvalidArgument, {"past_seqlens[0]", "22"});
  }
  spec.positions = Positions::kSequential;
  for (const std::int32_t position : {-1, 1000}) {
    Call call(spec);
    call.int32_at("query_positions", 7) = position;
    expect_refusal(call, StatusCode::kInvalidArgument, {"query_positions[7]", std::to_string(position)});
  }
}

TEST(Refusal, BiasThatDoesNotCover) {
  Case spec = base();
  spec.bias = BiasShape::kBroadcastBoth;
  for (const std::size_t axis : {2u, 3u}) {
    Call call(spec);
    call.arguments.attention_bias.shape[axis] = 8;
    call.arguments.attention_bias.set_contiguous_strides();
    expect_refusal(call, StatusCode::kInvalidArgument, {"attention_bias", "8"});
  }
}

TEST(Refusal, TwoTokensForOneSlot) {
  Case spec = base();
  spec.slots = SlotStyle::kDerived;
  Call call(spec);
  call.set_slot(6, call.slot(3));
  expect_refusal(call, StatusCode::kInvalidArgument, {"slot_mapping", "3", "6", std::to_string(call.slot(3))});
}

TEST(Refusal, TwoSequencesThatAppendToOneBlock) {
  Call call(base());
  call.set_table(2, 0, call.table(1, 0));  // sequence 1 writes 0..8, sequence 2 writes 5
  expect_refusal(call, StatusCode::kInvalidArgument, {"block_table"});
}

TEST(Refusal, ShapesAndAttributes) {
  Case spec = base();
  spec.slots = SlotStyle::kDerived;
  Call call(spec);
  call.arguments.slot_mapping.shape[0] = 9;
  expect_refusal(call, StatusCode::kInvalidArgument, {"slot_mapping", "13", "9"});
  call.arguments.slot_mapping.shape[0] = 13;
  call.attributes.kv_num_heads = 3;
  expect_refusal(call, StatusCode::kInvalidArgument, {"kv_num_heads", "3"});
}

TEST(Refusal, ScoresBeyondTheLimit) {
  Case spec = base();
  spec.qk_output = 1;
  Call call(spec);
  Problem problem;
  ASSERT_TRUE(validate(call.arguments, call.attributes, problem).ok());
  PlanOptions options;
  options.output_qk_limit_bytes = 100;
  Plan decision;
  const Status status = plan(problem, options, decision);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status.message();
  EXPECT_NE(status.message().find("output_qk"), std::string::npos) << status.message();
}

TEST(Refusal, WorkspaceTooSmall) {
  Call call(base());
  Problem problem;
  ASSERT_TRUE(validate(call.arguments, call.attributes, problem).ok());
  for (const std::string& backend : accepting_backends(call)) {
    PlanOptions options;
    options.backend = backend;
    Plan decision;
    ASSERT_TRUE(plan(problem, options, decision).ok());
    if (decision.workspace_bytes() == 0) continue;
    GuardedBuffer workspace(decision.workspace_bytes(), kWorkspaceAlignment);
    const Call::Snapshot before = call.snapshot();
    const Status status = octavo::run(decision, call.arguments, Workspace{workspace.data(), workspace.size() - 1}, {});
    EXPECT_FALSE(status.ok()) << backend;
    EXPECT_EQ(call.changes_since(before), "") << backend;
    EXPECT_FALSE(octavo::run(decision, call.arguments, Workspace{}, {}).ok()) << backend;
  }
}

TEST(Refusal, BadDataUnderEveryFeature) {
  // The check comes before anything is written on every path, whatever the features.
  for (const Case& spec : single_feature_cases()) {
    Call call(spec);
    call.int32_at("past_seqlens", 3) = 1 << 20;
    expect_refusal(call, StatusCode::kInvalidArgument, {"past_seqlens[3]"});
  }
}

}  // namespace
}  // namespace octavo::testing
