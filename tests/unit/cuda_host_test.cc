// The host's side of the CUDA backends, on a machine with or without a GPU. Risks: a legal call that no backend takes,
// a workspace that is carved past its end or depends on what a replay may change, a build with CUDA that fails, rather
// than refuses with a sentence, where there is no driver.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/call.h"
#include "cuda/runtime.h"
#include "dispatch/choose.h"
#include "support/call.h"
#include "support/case_list.h"

namespace octavo::testing {
namespace {

Problem problem_of(const Call& call) {
  Problem problem;
  const Status status = validate(call.arguments, call.attributes, problem);
  EXPECT_TRUE(status.ok()) << status.message() << "\n" << to_string(call.spec());
  return problem;
}

Problem problem_of(const Case& spec) {
  return problem_of(Call(spec));
}

std::vector<const dispatch::Backend*> cuda_backends() {
  std::vector<const dispatch::Backend*> found;
  for (const dispatch::Backend* backend : dispatch::backends()) {
    if (backend->device == DeviceKind::kCuda) found.push_back(backend);
  }
  return found;
}

// The backend's answer, whatever device there is.
std::string refusal_without_device(const dispatch::Backend& backend, const Problem& problem) {
  dispatch::Backend host_part = backend;
  host_part.refuse_device = nullptr;
  return dispatch::refusal(host_part, problem);
}

std::vector<Case> all_cases() {
  std::vector<Case> all;
  for (const auto& list : {single_feature_cases(), feature_pair_cases(), type_cases(), size_cases(), length_cases()}) {
    all.insert(all.end(), list.begin(), list.end());
  }
  for (std::uint64_t seed = 1; seed <= 200; ++seed) all.push_back(random_case(seed));
  return all;
}

PlanOptions on_cuda(int ordinal = 0) {
  PlanOptions options;
  options.device = DeviceKind::kCuda;
  options.device_ordinal = ordinal;
  return options;
}

TEST(CudaBackends, HaveNamesOfTheirOwn) {
  std::set<std::string_view> names;
  ASSERT_FALSE(cuda_backends().empty());
  for (const dispatch::Backend* backend : cuda_backends()) {
    EXPECT_EQ(std::string_view(backend->name).substr(0, 5), "cuda_");
    EXPECT_TRUE(names.insert(backend->name).second) << backend->name;
    EXPECT_EQ(std::string_view(backend->description).back(), '.') << backend->description;
  }
}

TEST(CudaBackends, OneOfThemTakesEveryLegalCall) {
  for (const Case& spec : all_cases()) {
    const Problem problem = problem_of(spec);
    std::string refusals;
    bool taken = false;
    for (const dispatch::Backend* backend : cuda_backends()) {
      const std::string refusal = refusal_without_device(*backend, problem);
      taken = taken || refusal.empty();
      refusals += std::string(backend->name) + ": " + refusal + "\n";
    }
    EXPECT_TRUE(taken) << refusals << to_string(spec);
  }
}

// A captured graph keeps its workspace while lengths and tables change.
TEST(CudaWorkspace, GrowsWithTheBoundsOnly) {
  for (Case spec : single_feature_cases()) {
    spec.past = {3000, 0, 17};
    spec.added = {1, 9, 2};
    spec.table_columns = 4096 / spec.block_size;
    if (spec.table == TableStyle::kRing || spec.table == TableStyle::kSharedPrefix || spec.unmapped_holes > 0) continue;
    spec.metadata = Metadata::kAbsent;
    const Problem whole = problem_of(spec);
    spec.metadata = Metadata::kTight;
    const Problem bounded = problem_of(spec);
    ASSERT_LT(bounded.max_kv_len_bound, whole.max_kv_len_bound) << to_string(spec);
    for (const dispatch::Backend* backend : cuda_backends()) {
      if (!refusal_without_device(*backend, whole).empty()) continue;
      EXPECT_LE(backend->workspace_bytes(bounded, 1), backend->workspace_bytes(whole, 1)) << to_string(spec);
      EXPECT_EQ(backend->workspace_bytes(whole, 1), backend->workspace_bytes(whole, 64)) << "of the host's threads";
    }
  }
}

// A decode step of 1,000 sequences with tables for 131,072 positions each leaves room for the caches; larger tables
// never need less.
TEST(CudaWorkspace, LargeBatchesFitADevice) {
  Case spec;
  spec.type = ElementType::kFloat16;
  spec.head_size = 128;
  Problem problem = problem_of(spec);
  problem.batch_size = problem.token_count = 1000;
  problem.max_query_len_bound = 1;
  problem.num_heads = 64;
  problem.kv_num_heads = 8;
  for (const dispatch::Backend* backend : cuda_backends()) {
    std::size_t smaller = 1;
    for (const std::int64_t positions : {1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 30}) {
      problem.max_blocks_per_sequence = positions / problem.block_size;
      problem.max_kv_len_bound = problem.max_context_len = positions;
      if (!refusal_without_device(*backend, problem).empty()) continue;
      const std::size_t bytes = backend->workspace_bytes(problem, 1);
      EXPECT_GE(bytes, smaller) << backend->name << ", " << positions;
      EXPECT_TRUE(positions > 1 << 17 || bytes < std::size_t{2} << 30) << backend->name << ": " << bytes;
      smaller = bytes;
    }
  }
}

TEST(CudaWorkspace, IsCarvedIntoPiecesThatLieApart) {
  const auto at = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data); };
  for (const Case& spec : length_cases()) {
    const Problem problem = problem_of(spec);
    cuda::Scratch scratch;
    cuda::Carver counter(nullptr);
    const std::size_t bytes = cuda::carve(problem, counter, scratch);
    EXPECT_EQ(scratch.records, nullptr);
    // An address that is never used, so that a piece at an offset of 0 can be told from none.
    auto* const base = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 20);
    cuda::Carver carver(base);
    EXPECT_EQ(cuda::carve(problem, carver, scratch), bytes);
    std::vector<std::pair<std::uintptr_t, std::uintptr_t>> pieces;
    const auto records = static_cast<std::size_t>(problem.batch_size + 1) * sizeof(cuda::SequenceRecord);
    pieces.emplace_back(at(scratch.records), at(scratch.records) + records);
    if (scratch.chunks > 1) {
      const std::int64_t tokens = std::min(problem.token_count, cuda::kMaxSplitTokens * problem.batch_size);
      const auto states = static_cast<std::size_t>(tokens * problem.num_heads * scratch.chunks);
      const auto sums = states * static_cast<std::size_t>(problem.v_head_size);
      pieces.emplace_back(at(scratch.sums), at(scratch.sums) + sums * sizeof(float));
      pieces.emplace_back(at(scratch.states), at(scratch.states) + states * sizeof(float2));
    }
    std::sort(pieces.begin(), pieces.end());
    std::uintptr_t end = at(base);
    for (const auto& [first, last] : pieces) {
      EXPECT_EQ(first % kWorkspaceAlignment, 0u) << to_string(spec);
      EXPECT_GE(first, end) << to_string(spec);
      end = last;
    }
    EXPECT_LE(end, at(base) + bytes) << to_string(spec);
  }
}

// A row's chunks depend on its own length, and kMaxChunks of them always reach its end.
TEST(CudaChunks, CoverEveryLength) {
  std::int64_t before = cuda::kChunkKeys;
  for (std::int64_t length = 1; length < (std::int64_t{1} << 40); length += length / 3 + 1) {
    const std::int64_t keys = cuda::chunk_keys(length);
    EXPECT_GE(keys * cuda::kMaxChunks, length);
    EXPECT_TRUE(keys == before || keys % before == 0) << length;
    EXPECT_TRUE(keys == cuda::kChunkKeys || keys / 2 * cuda::kMaxChunks < length) << "more than needed at " << length;
    before = keys;
  }
}

// Byte strides against the tensors of the Call, in the three orders of a cache.
TEST(CudaCall, FindsTheRowsOfEveryCacheOrder) {
  for (const CacheOrder order : {CacheOrder::kTokenMajor, CacheOrder::kHeadMajor, CacheOrder::kKvInterleaved}) {
    for (const CacheType type : {CacheType::kTensorType, CacheType::kInt8, CacheType::kInt4}) {
      const QuantType quant = type == CacheType::kTensorType ? QuantType::kNone : QuantType::kPerChannel;
      Case spec = with_cache(Case{}, type, quant, type, quant);
      spec.type = ElementType::kFloat16;
      spec.cache_order = order;
      const Call call(spec);
      const Problem problem = problem_of(call);
      cuda::Scratch scratch;
      const cuda::Call made = cuda::make_call(problem, call.arguments, scratch);
      for (std::int64_t block = 0; block < problem.num_blocks; ++block) {
        for (const std::int64_t slot : {std::int64_t{0}, problem.block_size - 1}) {
          for (std::int64_t head = 0; head < problem.kv_num_heads; ++head) {
            const std::int64_t flat = block * problem.block_size + slot;
            EXPECT_EQ(made.k_cache.data + made.k_cache.offset(block, slot, head),
                      call.cache_row(call.arguments.key_cache, flat, head))
                << to_string(spec);
            EXPECT_EQ(made.v_cache.data + made.v_cache.offset(block, slot, head),
                      call.cache_row(call.arguments.value_cache, flat, head))
                << to_string(spec);
          }
        }
      }
      EXPECT_EQ(made.k_cache.scale, quant == QuantType::kNone ? nullptr : call.arguments.k_scale.data);
      EXPECT_EQ(made.v_cache.per_channel, quant == QuantType::kPerChannel);
    }
  }
}

TEST(CudaCall, FindsQAndKAndVInOneTensor) {
  Case spec;
  spec.packed_qkv = true;
  const Call call(spec);
  const cuda::Call made = cuda::make_call(problem_of(call), call.arguments, {});
  const auto* data = static_cast<const std::byte*>(call.arguments.query.data);
  const std::int64_t head_bytes = spec.head_size * 4;
  const std::int64_t token_bytes = (spec.num_heads + 2 * spec.kv_num_heads) * head_bytes;
  EXPECT_EQ(made.query.row(1, 2), data + token_bytes + 2 * head_bytes);
  EXPECT_EQ(made.key.row(1, 1), data + token_bytes + (spec.num_heads + 1) * head_bytes);
  EXPECT_EQ(made.value.row(1, 1), data + token_bytes + (spec.num_heads + spec.kv_num_heads + 1) * head_bytes);
}

// Without a driver the refusal is what a user reads; with one, plan() and explain() agree about the device.
TEST(CudaDevice, IsTakenOrRefusedWithASentence) {
  const Problem problem = problem_of(Case{});
  cuda::DeviceFacts facts;
  const std::string missing = cuda::read_device(0, facts);
  EXPECT_TRUE(missing.empty() || missing.rfind("no usable CUDA device 0: ", 0) == 0) << missing;
  const std::vector<Verdict> verdicts = explain(problem, on_cuda());
  ASSERT_EQ(verdicts.size(), cuda_backends().size());
  bool taken = false;
  for (std::size_t i = 0; i < verdicts.size(); ++i) {
    EXPECT_EQ(verdicts[i].backend, cuda_backends()[i]->name);
    taken = taken || verdicts[i].refusal.empty();
    if (!refusal_without_device(*cuda_backends()[i], problem).empty()) continue;
    EXPECT_NE(verdicts[i].refusal.find(missing), std::string::npos) << verdicts[i].refusal;
  }
  EXPECT_FALSE(taken && !missing.empty());
  Plan made;
  const Status status = plan(problem, on_cuda(), made);
  EXPECT_EQ(status.ok(), taken);
  EXPECT_EQ(made.valid(), taken);
  if (taken) return;
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find(missing), std::string::npos) << status.message();
}

TEST(CudaDevice, IsRefusedWhereTheMachineDoesNotHaveIt) {
  const Problem problem = problem_of(Case{});
  for (const int ordinal : {-1, 1000}) {
    for (const Verdict& verdict : explain(problem, on_cuda(ordinal))) EXPECT_NE(verdict.refusal, "") << verdict.backend;
    Plan made;
    const Status status = plan(problem, on_cuda(ordinal), made);
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    EXPECT_NE(status.message().find("CUDA device"), std::string::npos) << status.message();
  }
}

TEST(CudaDevice, LeavesTheCpuAlone) {
  Plan made;
  ASSERT_TRUE(plan(problem_of(Case{}), {}, made).ok());
  EXPECT_EQ(made.backend_name().substr(0, 4), "cpu_");
  for (const Verdict& verdict : explain(problem_of(Case{}))) EXPECT_EQ(verdict.backend.substr(0, 4), "cpu_");
}

TEST(CudaDevice, AWrongBackendNameGetsTheNamesThatThereAre) {
  Plan made;
  PlanOptions options = on_cuda();
  options.backend = "cpu_baseline";
  const Status status = plan(problem_of(Case{}), options, made);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  std::string names;
  for (const dispatch::Backend* backend : cuda_backends())
    names += (names.empty() ? "" : ", ") + std::string(backend->name);
  EXPECT_EQ(status.message(),
            "PlanOptions::backend: must name a backend for the cuda or be empty, got 'cpu_baseline'; "
            "this build has " +
                names);
}

}  // namespace
}  // namespace octavo::testing
