// What decision 1 (docs/decisions/0001-fixed-tiles-and-chunks.md) promises, bit for bit: a sequence's numbers depend
// neither on its batch nor on the number of threads, and on the cpu_* backends not on the pieces that it is fed in.
#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "backends/harness.h"
#include "support/executors.h"

namespace octavo::testing {
namespace {

// Runs `batch` serially and on three lanes, and each of `members` alone and serially.
void expect_same_bits_alone(const Case& batch, const std::vector<std::int64_t>& members) {
  Call together(batch);
  const Call::Snapshot start = together.snapshot();
  ShufflingExecutor three(3, 17);
  for (const std::string& backend : accepting_backends(together)) {
    std::vector<std::vector<std::byte>> alone_bits;
    for (const std::int64_t b : members) {
      Case alone = batch;
      alone.past = {batch.past[static_cast<std::size_t>(b)]};
      alone.added = {batch.added[static_cast<std::size_t>(b)]};
      alone.identities = {b};
      alone_bits.push_back(output_bits(alone, {.backend = backend}));
    }
    for (Executor* executor : {&serial_executor(), static_cast<Executor*>(&three)}) {
      together.restore(start);
      run_ok(together, {.backend = backend, .executor = executor});
      for (std::size_t i = 0; i < members.size(); ++i) {
        const std::int64_t b = members[i];
        const std::int64_t begin = together.int32_at("cumulative_sequence_length", b);
        const std::int64_t end = together.int32_at("cumulative_sequence_length", b + 1);
        EXPECT_EQ(alone_bits[i], output_rows(together, begin, end))
            << backend << " on " << executor->concurrency() << " lanes: sequence " << b << " of " << batch.name
            << " has other bits alone";
      }
    }
  }
}

TEST(BatchInvariance, SameBitsAloneAndAmong300) {
  for (Case batch : varied_cases()) {
    batch.past.clear();
    batch.added.clear();
    std::vector<std::int64_t> members = {150, 151};
    for (std::int64_t b = 0; b < 300; ++b) {
      batch.past.push_back(b * 37 % 150);
      batch.added.push_back(b % 17 == 0 ? 9 : b % 13 == 0 ? 0 : 1);
      if (b % 23 == 0) members.push_back(b);
    }
    batch.past[150] = 1030;
    batch.added[151] = 70;
    expect_same_bits_alone(batch, members);
  }
}

// Alone, a long sequence is all of the work; among others it is a part, and lanes split it elsewhere or not at all.
TEST(BatchInvariance, SameBitsOfLongSequences) {
  for (Case batch : varied_cases()) {
    batch.past = {0, 4500, 17, 5117, 300, 2040};
    batch.added = {70, 1, 1, 5, 0, 20};
    expect_same_bits_alone(batch, {0, 1, 2, 3, 5});
  }
}

TEST(BatchInvariance, SameBitsAtAnyPlaceInTheBatch) {
  ShufflingExecutor three(3, 23);
  for (Case spec : varied_cases()) {
    spec.past = {40, 0, 7};
    spec.added = {1, 12, 3};
    spec.identities = {0, 1, 2};
    Case turned = spec;
    turned.past = {7, 40, 0};
    turned.added = {3, 1, 12};
    turned.identities = {2, 0, 1};
    Call a(spec), b(turned);
    for (const std::string& backend : accepting_backends(a)) {
      run_ok(a, {.backend = backend});
      run_ok(b, {.backend = backend, .executor = &three});
      EXPECT_EQ(output_rows(a, 13, 16), output_rows(b, 0, 3)) << backend << " " << spec.name;
      EXPECT_EQ(output_rows(a, 0, 13), output_rows(b, 3, 16)) << backend << " " << spec.name;
    }
  }
}

TEST(Threads, SameBitsForAnyExecutor) {
  for (Case spec : varied_cases()) {
    spec.past = {0, 700, 2300, 15};
    spec.added = {90, 1, 1, 5};
    Call serial(spec), other(spec);
    const Call::Snapshot start = other.snapshot();
    for (const std::string& backend : accepting_backends(serial)) {
      serial.restore(start);
      run_ok(serial, {.backend = backend});
      std::vector<std::unique_ptr<Executor>> executors;
      for (const int threads : {1, 2, 3, 7}) {
        executors.push_back(std::make_unique<ReverseExecutor>(threads));
        executors.push_back(std::make_unique<ShufflingExecutor>(threads, 11));
      }
      std::vector<Executor*> all = {&default_executor()};
      for (const auto& executor : executors) all.push_back(executor.get());
      for (Executor* executor : all) {
        other.restore(start);
        run_ok(other, {.backend = backend, .executor = executor});
        EXPECT_EQ(first_difference(serial, other, kAllResults), "")
            << backend << " " << spec.name << " with concurrency " << executor->concurrency();
      }
    }
  }
}

TEST(Threads, AnExecutorOtherThanThePlansIsSafe) {
  for (Case spec : varied_cases()) {
    spec.past = {0, 700, 15};
    spec.added = {40, 1, 5};
    Call expected(spec), call(spec);
    const Call::Snapshot start = call.snapshot();
    Problem problem;
    ASSERT_TRUE(validate(call.arguments, call.attributes, problem).ok());
    for (const std::string& backend : accepting_backends(call)) {
      expected.restore(start);
      run_ok(expected, {.backend = backend});
      for (const auto& [planned, actual] : {std::pair{1, 7}, {7, 1}, {2, 3}}) {
        PlanOptions options;
        options.backend = backend;
        options.concurrency = planned;
        Plan decision;
        ASSERT_TRUE(plan(problem, options, decision).ok());
        GuardedBuffer workspace(decision.workspace_bytes(), kWorkspaceAlignment);
        ShufflingExecutor executor(actual, 3);
        RunContext context;
        context.executor = &executor;
        call.restore(start);
        const Status status =
            octavo::run(decision, call.arguments, Workspace{workspace.data(), workspace.size()}, context);
        EXPECT_TRUE(status.ok()) << status.message();
        EXPECT_TRUE(workspace.intact()) << backend << " planned for " << planned << ", ran on " << actual;
        EXPECT_EQ(first_difference(expected, call, kAllResults), "") << backend << " " << spec.name;
      }
    }
  }
}

// A tile whose chunks lanes share out is folded wave by wave, eight chunks a lane, and its state is carried from wave
// to wave. Risk: a carry that is lost, taken from the wrong place, or finished too early. Neither shows before a tile
// has more than eight chunks of 1,024 keys a lane.
void expect_the_same_on_several_lanes(Case spec) {
  spec.num_heads = 4;
  spec.kv_num_heads = 1;
  spec.head_size = 8;
  Case probabilities = spec;
  probabilities.name = "probabilities";
  probabilities.head_sink = probabilities.lse = true;
  probabilities.qk_output = 2;
  Case int8 = with_cache(spec, CacheType::kInt8, QuantType::kPerChannel, CacheType::kInt8, QuantType::kPerTensor);
  int8.name = "int8";
  Case streamed = int8;  // a tile of the cpu_* backends takes both KV heads
  streamed.name = "streamed";
  streamed.kv_num_heads = 2;
  streamed.head_size = 32;
  for (const Case& varied : {spec, probabilities, int8, streamed}) {
    Call serial(varied), other(varied);
    const Call::Snapshot start = other.snapshot();
    for (const std::string& backend : accepting_backends(serial)) {
      serial.restore(start);
      EXPECT_TRUE(judge(serial, {.backend = backend}));
      for (const int lanes : {2, 3, 5}) {
        ShufflingExecutor executor(lanes, 7);
        other.restore(start);
        run_ok(other, {.backend = backend, .executor = &executor});
        EXPECT_EQ(first_difference(serial, other, kAllResults), "")
            << backend << " " << varied.name << " on " << lanes << " lanes";
      }
    }
  }
}

TEST(SplitTiles, OneTileOverManyWaves) {
  Case spec;
  spec.name = "plain";
  spec.past = {44000};  // 43 chunks: in 3 waves of 16, 2 of 24, 2 of 40
  spec.added = {1};
  expect_the_same_on_several_lanes(spec);
}

TEST(SplitTiles, SeveralTilesStraddleWavesUnevenly) {
  Case spec;
  spec.name = "plain";
  spec.past = {9300, 20900, 700, 6134, 5104};  // 10, 21, 1, 6, 5 and 6 chunks
  spec.added = {1, 1, 3, 2, 18};  // 18 tokens x 4 heads: two tiles, of which the second sees position 5,120
  expect_the_same_on_several_lanes(spec);
}

// On any device: the same caches, and outputs as the oracle has them.
TEST(Pieces, LeaveTheSameCachesAndRightOutputs) {
  constexpr std::int64_t kLength = 150;
  for (Case spec : varied_cases()) {
    spec.table_columns = 12;
    spec.past = {0};
    spec.added = {kLength};
    Call whole(spec);
    for (const std::string& backend : accepting_backends(whole)) {
      run_ok(whole, {.backend = backend});
      Call::Snapshot caches;
      std::int64_t done = 0;
      for (const std::int64_t chunk : {1, 63, 17, 64, 5}) {
        Case part = spec;
        part.past = {done};
        part.added = {chunk};
        Call call(part);
        call.restore(caches);
        EXPECT_TRUE(judge(call, {.backend = backend})) << "chunk at " << done;
        caches = caches_of(call);
        done += chunk;
        if (done == kLength) {
          EXPECT_EQ(first_difference(whole, call, {"key_cache", "value_cache"}), "") << backend << " " << spec.name;
        }
      }
    }
  }
}

// Prompts and speculative tokens whose bits the cpu_* backends promise whatever the pieces: every pair of float32 and
// float16 tokens with caches of T and of int8, the other cache types, then what is computed per query.
std::vector<Case> promised_cases() {
  std::vector<Case> cases;
  for (const ElementType type : {ElementType::kFloat32, ElementType::kFloat16}) {
    for (const CacheType cache : {CacheType::kTensorType, CacheType::kInt8}) {
      Case c;
      c.type = type;
      c.head_size = 32;
      c.lse = true;
      c.rotary = Rotary::kHalf;
      c = with_cache(c, cache, QuantType::kPerChannel, cache, QuantType::kPerTensor);
      c.name = std::string(name(type)) + (cache == CacheType::kInt8 ? "_int8" : "");
      cases.push_back(c);
    }
  }
  for (const CacheType cache : {CacheType::kFloat8E4M3FN, CacheType::kInt4, CacheType::kFloat4E2M1}) {
    Case c = with_cache(cases[0], cache, QuantType::kPerTensor, cache, QuantType::kPerChannel);
    c.name = name(cache);
    cases.push_back(c);
  }
  // Rows of codes that fill whole vectors of cpu_avx512_vnni, and one and a half.
  for (const auto& [cache, head_size] :
       {std::pair{CacheType::kInt4, 64}, {CacheType::kInt4, 192}, {CacheType::kInt8, 96}}) {
    Case c = with_cache(cases[0], cache, QuantType::kPerChannel, cache, QuantType::kPerTensor);
    c.head_size = head_size;
    c.name = std::string(name(cache)) + "_" + std::to_string(head_size);
    cases.push_back(c);
  }
  Case bfloat16 = cases[0];
  bfloat16.name = "bfloat16";
  bfloat16.type = ElementType::kBFloat16;
  cases.push_back(bfloat16);
  Case windowed = cases[1];
  windowed.name = "windowed";
  windowed.window = 500;
  windowed.head_sink = windowed.qk_norm = true;
  windowed.softcap = 5.0f;
  cases.push_back(windowed);
  Case latent;
  latent.name = "latent";
  latent.latent = true;
  latent.num_heads = 6;
  latent.kv_num_heads = 1;
  latent.head_size = 72;
  latent.v_head_size = 64;
  latent.scale = 0.1f;
  latent.lse = true;
  cases.push_back(latent);
  return cases;
}

// The backends that decision 1 speaks of. Others may let the pieces decide how queries share a tile.
std::vector<std::string> promising_backends(const Call& call) {
  std::vector<std::string> backends = accepting_backends(call);
  std::erase_if(backends, [](const std::string& backend) { return !backend.starts_with("cpu_"); });
  return backends;
}

// Expects tokens [first, first + count) of `whole` to be tokens [begin, begin + count) of `part`.
void expect_same_tokens(Call& whole, std::int64_t first, Call& part, std::int64_t begin, std::int64_t count,
                        const std::string& where) {
  EXPECT_TRUE(output_rows(whole, first, first + count) == output_rows(part, begin, begin + count)) << where;
  const TensorView whole_lse = whole.arguments.lse, part_lse = part.arguments.lse;
  for (std::int64_t h = 0; h < whole_lse.shape[0]; ++h) {
    for (std::int64_t t = 0; t < count; ++t) {
      ASSERT_EQ(whole.get(whole_lse, h * whole_lse.shape[1] + first + t),
                part.get(part_lse, h * part_lse.shape[1] + begin + t))
          << where << ": lse of head " << h << ", token " << t << " of the piece";
    }
  }
}

TEST(Pieces, APromptHasTheSameBitsWholeAndInPieces) {
  constexpr std::int64_t kLength = 1300;
  for (Case spec : promised_cases()) {
    spec.table_columns = kLength / spec.block_size + 2;
    spec.past = {0};
    spec.added = {kLength};
    Call whole(spec);
    for (const std::string& backend : promising_backends(whole)) {
      run_ok(whole, {.backend = backend});
      Call::Snapshot caches;
      std::int64_t done = 0;
      for (const std::int64_t piece : {1, 63, 900, 17, 64, 5, 250}) {  // one straddles position 1,024
        spec.past = {done};
        spec.added = {piece};
        Call part(spec);
        part.restore(caches);
        run_ok(part, {.backend = backend});
        expect_same_tokens(whole, done, part, 0, piece,
                           backend + " " + spec.name + ": piece at " + std::to_string(done));
        caches = caches_of(part);
        done += piece;
      }
      ASSERT_EQ(done, kLength);
    }
  }
}

TEST(Pieces, SpeculativeTokensHaveTheSameBitsTogetherAndOneByOne) {
  constexpr std::int64_t kTokens = 5;
  for (Case spec : promised_cases()) {
    spec.table_columns = 70;
    spec.past = {1021, 61};  // over the edges of a chunk and of a tile
    spec.added = {kTokens, kTokens};
    Call together(spec);
    for (const std::string& backend : promising_backends(together)) {
      run_ok(together, {.backend = backend});
      Call::Snapshot caches;
      for (std::int64_t step = 0; step < kTokens; ++step) {
        Case one = spec;
        one.added = {1, 1};
        for (std::int64_t& past : one.past) past += step;
        Call call(one);
        call.restore(caches);
        run_ok(call, {.backend = backend});
        for (std::int64_t b = 0; b < spec.batch_size(); ++b) {
          expect_same_tokens(
              together, b * kTokens + step, call, b, 1,
              backend + " " + spec.name + ": token " + std::to_string(step) + " of sequence " + std::to_string(b));
        }
        caches = caches_of(call);
      }
    }
  }
}

}  // namespace
}  // namespace octavo::testing
