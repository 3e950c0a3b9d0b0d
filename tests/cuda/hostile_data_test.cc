// Bad values in device memory, which nobody can see without waiting: never an access out of bounds, and what the
// contract says comes out (docs/contract.md).
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "cuda/device_call.h"
#include "cuda/varied_cases.h"
#include "support/codecs.h"
#include "support/random.h"

namespace octavo::testing {
namespace {

Case batch_of_four(Case spec) {
  spec.past = {0, 19, 33, 7};
  spec.added = {7, 1, 2, 4};
  spec.lse = true;
  return spec;
}

// Cache rows that the tokens of `sequence` are written to.
std::vector<std::int64_t> written_slots(const Call& clean, std::int64_t sequence) {
  std::vector<std::int64_t> slots;
  const auto i = static_cast<std::size_t>(sequence);
  for (std::int64_t j = 0; j < clean.spec().added[i]; ++j)
    slots.push_back(clean.table_slot(sequence, clean.spec().past[i] + j));
  return slots;
}

// Lets `alter` break the lengths of the sequences `rejected`: these write nothing and output 0, the others do as ever.
void expect_rejected(const Case& spec, const std::set<std::int64_t>& rejected,
                     const std::function<void(Call&)>& alter) {
  Call clean(spec);
  for (const std::string& backend : cuda_backends(clean)) {
    Call broken(spec);
    alter(broken);
    run_on_cuda(clean, backend);
    run_on_cuda(broken, backend);

    std::int64_t token = 0;
    const CacheType format = format_of(spec.type);
    const std::int64_t width = clean.arguments.output.shape[1];
    for (std::int64_t b = 0; b < spec.batch_size(); ++b) {
      for (std::int64_t j = 0; j < spec.added[static_cast<std::size_t>(b)]; ++j, ++token) {
        for (std::int64_t c = 0; c < width; ++c) {
          const double want =
              rejected.count(b) != 0 ? 0.0 : load(format, clean.arguments.output.data, token * width + c);
          ASSERT_EQ(load(format, broken.arguments.output.data, token * width + c), want)
              << "token " << token << " of sequence " << b << ", " << to_string(spec);
        }
        for (std::int64_t h = 0; h < spec.num_heads; ++h) {
          const std::int64_t at = h * clean.arguments.lse.shape[1] + token;
          const double want =
              rejected.count(b) != 0 ? -std::numeric_limits<double>::infinity() : clean.get(clean.arguments.lse, at);
          ASSERT_EQ(broken.get(broken.arguments.lse, at), want);
        }
      }
    }
    // The caches: as before the call where a rejected sequence would have written, else as after the clean run.
    Call untouched(spec);
    for (const std::int64_t b : rejected) {
      for (const std::int64_t slot : written_slots(clean, b)) {
        for (std::int64_t g = 0; g < spec.kv_num_heads; ++g) {
          for (auto cache : {&Arguments::key_cache, &Arguments::value_cache}) {
            const MutableTensorView& view = clean.arguments.*cache;
            if (!view.present()) continue;
            const auto bytes = static_cast<std::size_t>(view.shape[3]) * size_in_bytes(view.type);
            std::memcpy(clean.cache_row(view, slot, g), untouched.cache_row(untouched.arguments.*cache, slot, g),
                        bytes);
          }
        }
      }
    }
    EXPECT_EQ(first_difference(clean, broken, {"key_cache", "value_cache"}), "") << to_string(spec);
  }
}

void set_past(Call& call, std::int64_t b, std::int32_t value) {
  call.int32_at("past_seqlens", b) = value;
}
void set_end(Call& call, std::int64_t b, std::int32_t value) {
  call.int32_at("cumulative_sequence_length", b + 1) = value;
}

TEST(CudaHostileLengths, SequencesThatBreakTheContractWriteNothingAndOutputZero) {
  for (const Case& varied : varied_cases()) {
    const Case spec = batch_of_four(varied);
    expect_rejected(spec, {1}, [](Call& c) { set_past(c, 1, -1); });
    expect_rejected(spec, {1}, [](Call& c) { set_past(c, 1, INT_MIN); });
    expect_rejected(spec, {2}, [](Call& c) { set_past(c, 2, INT_MAX); });
    const auto capacity = [](const Call& c) {
      return static_cast<std::int32_t>(c.arguments.block_table.shape[1] * c.spec().block_size);
    };
    expect_rejected(spec, {3}, [&](Call& c) { set_past(c, 3, capacity(c) - 3); });
    // 0 7 3 10 14: sequence 1 ends before it starts, sequence 2 starts inside of sequence 0.
    expect_rejected(spec, {1, 2}, [](Call& c) { set_end(c, 1, 3); });
    expect_rejected(spec, {1, 2}, [](Call& c) { set_end(c, 1, INT_MIN); });
    expect_rejected(spec, {3}, [](Call& c) { set_end(c, 3, 15); });
    expect_rejected(spec, {3}, [](Call& c) { set_end(c, 3, INT_MAX); });
    expect_rejected(spec, {0, 1, 2, 3}, [](Call& c) { set_end(c, 0, INT_MAX); });
    expect_rejected(spec, {0}, [](Call& c) { set_end(c, -1, -5); });
    if (HasFatalFailure()) return;
  }
}

TEST(CudaHostilePositions, PositionsWithoutRotationRejectTheirSequence) {
  for (const Rotary rotary : {Rotary::kHalf, Rotary::kInterleaved}) {
    for (const Positions positions : {Positions::kSequential, Positions::kTree}) {
      Case spec;
      spec.rotary = rotary;
      spec.positions = positions;
      spec = batch_of_four(spec);
      const auto limit = [](const Call& c) { return static_cast<std::int32_t>(c.arguments.cos_cache.shape[0]); };
      expect_rejected(spec, {2}, [&](Call& c) { c.int32_at("query_positions", 9) = limit(c); });
      expect_rejected(spec, {2}, [&](Call& c) { c.int32_at("query_positions", 8) = INT_MAX; });
      expect_rejected(spec, {0}, [&](Call& c) { c.int32_at("query_positions", 3) = -1; });
    }
  }
  Case spec;
  spec.rotary = Rotary::kHalf;
  spec = batch_of_four(spec);
  Call call(spec);
  // Without query_positions the last position is past + new - 1: a cos_cache of 34 rows ends before sequence 2's second
  // token.
  const auto shorten = [](Call& c) { c.arguments.cos_cache.shape[0] = c.arguments.sin_cache.shape[0] = 34; };
  expect_rejected(spec, {2}, shorten);
}

TEST(CudaHostileLengths, TokensBeforeTheFirstSequenceArePadding) {
  for (const Case& varied : varied_cases()) {
    Call call(batch_of_four(varied));
    call.int32_at("cumulative_sequence_length", 0) = 2;
    for (const std::string& backend : cuda_backends(call))
      EXPECT_TRUE(judge_on_cuda(call, backend, Placement::kAligned));
  }
}

// The oracle, too, takes an id that is none for -1, and a slot that is none for unset.
TEST(CudaHostileIds, WildIdsCountAsUnmappedAndWildSlotsAreNotWritten) {
  for (const ElementType index_type : {ElementType::kInt32, ElementType::kInt64}) {
    for (Case spec : varied_cases()) {
      spec = batch_of_four(spec);
      spec.index_type = index_type;
      spec.slots = SlotStyle::kDerived;
      spec.hostile = false;  // a row that stays unwritten is read as it is, and NaN may spread within its sequence
      Call call(spec);
      const std::int64_t blocks = call.arguments.key_cache.shape[0];
      const std::int64_t slots = blocks * spec.block_size;
      const std::int64_t wildest = index_type == ElementType::kInt64 ? std::int64_t{1} << 62 : INT_MAX;
      call.set_table(1, 0, blocks);
      call.set_table(2, 1, -2);
      call.set_table(2, 0, wildest);
      call.set_table(3, 0, -wildest);
      call.set_slot(0, slots);
      call.set_slot(2, -wildest);
      call.set_slot(7, wildest);
      call.set_slot(9, -2);
      for (const std::string& backend : cuda_backends(call))
        EXPECT_TRUE(judge_on_cuda(call, backend, Placement::kAligned));
    }
  }
}

// Too small a bound may give a wrong number, but touches no other memory and hurts no later call.
TEST(CudaHostileBounds, TooSmallBoundsStayInBounds) {
  for (Case spec : varied_cases()) {
    spec.past = {2500, 100, 3000};
    spec.added = {1, 20, 2};
    spec.metadata = Metadata::kTight;
    spec.qk_output = 1;
    for (const std::int32_t bound : {1, 17, 1500}) {
      Call call(spec);
      call.int32_at("attention_metadata", 0) = 1;
      call.int32_at("attention_metadata", 1) = bound;
      call.int32_at("attention_metadata", 2) = 0;
      call.arguments.output_qk.shape[2] = bound;
      call.arguments.output_qk.set_contiguous_strides();
      const std::vector<std::byte> scores = call.buffer("output_qk").copy();
      for (const std::string& backend : cuda_backends(call)) {
        run_on_cuda(call, backend);
        // Nothing past the smaller output_qk.
        const std::vector<std::byte> after = call.buffer("output_qk").copy();
        const auto used = static_cast<std::ptrdiff_t>(call.arguments.output_qk.element_count()) * 4;
        EXPECT_TRUE(std::equal(scores.begin() + used, scores.end(), after.begin() + used)) << "bound " << bound;
      }
    }
  }
}

// Lengths, positions, ids and slots drawn from everything an int32 can hold: no fault, no broken guard, inputs
// unchanged.
TEST(CudaHostileData, RandomValuesStayInBounds) {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    Random random(seed);
    const std::vector<Case> cases = varied_cases();
    Case spec = batch_of_four(cases[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(cases.size())))]);
    if (random.chance(0.5)) spec.positions = Positions::kSequential;
    if (random.chance(0.5)) spec.slots = SlotStyle::kDerived;
    if (random.chance(0.3) && !spec.latent) spec.bias = BiasShape::kFull;
    if (random.chance(0.3)) spec.qk_output = random.between(1, 2);
    spec.past[0] = random.between(0, 2000);
    Call call(spec);
    const auto wild = [&] {
      return static_cast<std::int32_t>(
          random.pick<std::int64_t>({INT_MIN, INT_MAX, -1, 0, 1, 14, 15, 64, random.between(INT_MIN, INT_MAX),
                                     random.between(-5, 40), random.between(0, 3000)}));
    };
    for (const char* name :
         {"cumulative_sequence_length", "past_seqlens", "block_table", "query_positions", "slot_mapping"}) {
      if (!call.has_buffer(name)) continue;
      const auto count = static_cast<std::int64_t>(call.buffer(name).size() / 4);
      const double share = random.pick({0.05, 0.3, 1.0});
      for (std::int64_t i = 0; i < count; ++i) {
        if (random.chance(share)) call.int32_at(name, i) = wild();
      }
    }
    for (const std::string& backend : cuda_backends(call)) {
      const Call::Snapshot before = call.snapshot();
      run_on_cuda(call, backend);
      if (HasFailure()) FAIL() << "seed " << seed << ": " << to_string(spec);
      Call::Snapshot inputs = before;
      for (const char* name : {"output", "output_qk", "lse", "key_cache", "value_cache"}) inputs.erase(name);
      ASSERT_EQ(call.changes_since(inputs), "") << "seed " << seed;
    }
  }
}

}  // namespace
}  // namespace octavo::testing
