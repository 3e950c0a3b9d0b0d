// CUDA graphs: one capture serves steps whose lengths grow, whose tables fill and whose sequences finish.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/device_call.h"
#include "cuda/varied_cases.h"

namespace octavo::testing {
namespace {

constexpr int kSteps = 64;
constexpr std::int64_t kBatch = 5;

const std::vector<std::string> kResults = {"output", "lse", "key_cache", "value_cache"};

// Step `step` of a captured decode batch: one token a sequence; the lengths cross key tiles, blocks and chunks;
// sequence 3 finishes after step 20, sequence 1 after step 40, and their tokens become padding.
Case step_case(Case spec, int step, Metadata metadata) {
  spec.past = {1000 + step, 30 + step, step, 200 + step, 2040 + step};
  spec.added = {1, step > 40 ? 0 : 1, 1, step > 20 ? 0 : 1, 1};
  if (step > 40) spec.past[1] = 0;
  if (step > 20) spec.past[3] = 0;
  spec.padding_tokens = (step > 20 ? 1 : 0) + (step > 40 ? 1 : 0);
  spec.table_columns = 3000 / spec.block_size;
  spec.metadata = metadata;
  return spec;
}

// Tensors whose shapes do not depend on the lengths; those of cos_cache and sin_cache do, and the last step's serve
// all.
std::vector<std::string> step_tensors(const Call& call) {
  std::vector<std::string> names;
  for (const auto& [name, bytes] : call.snapshot()) {
    if (name != "cos_cache" && name != "sin_cache" && name != "attention_metadata") names.push_back(name);
  }
  return names;
}

class Graph {
 public:
  Graph(const DeviceCall& call, cudaStream_t stream) {
    expect_success(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    const Status status = call.launch(stream);
    EXPECT_TRUE(status.ok()) << status.message();
    cudaGraph_t graph = nullptr;
    expect_success(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    expect_success(cudaGraphInstantiate(&executable_, graph, 0), "cudaGraphInstantiate");
    cudaGraphDestroy(graph);
  }
  ~Graph() { cudaGraphExecDestroy(executable_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void replay(cudaStream_t stream) const { expect_success(cudaGraphLaunch(executable_, stream), "cudaGraphLaunch"); }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

void expect_replays_equal(const Case& spec, Metadata metadata) {
  Call last(step_case(spec, kSteps - 1, metadata));
  if (metadata == Metadata::kLoose) {  // bounds of every step
    last.int32_at("attention_metadata", 0) = 3;
    last.int32_at("attention_metadata", 1) = 2500;
  }
  for (const std::string& backend : cuda_backends(last)) {
    DeviceCall captured(last);
    DeviceCall direct(last);
    for (DeviceCall* call : {&captured, &direct}) {
      const Status status = call->prepare(backend);
      ASSERT_TRUE(status.ok()) << status.message();
      call->upload();
    }
    const Graph graph(captured, test_stream());
    for (int step = 0; step < kSteps; ++step) {
      Call now(step_case(spec, step, metadata));
      for (DeviceCall* call : {&captured, &direct}) call->upload(step_tensors(now), now);
      graph.replay(test_stream());
      expect_success(cudaStreamSynchronize(test_stream()), "replay");
      captured.download();
      ASSERT_EQ(captured.broken_guards(), "");
      const Call::Snapshot replayed = last.snapshot();
      const Status status = direct.launch(test_stream());
      ASSERT_TRUE(status.ok()) << status.message();
      expect_success(cudaStreamSynchronize(test_stream()), "run");
      direct.download();
      ASSERT_EQ(last.changes_since(replayed), "") << "step " << step << " of " << to_string(spec);
      // And as a call of its own, made for this step alone.
      if (step % 8 == 0 && spec.rotary == Rotary::kNone) {
        run_on_cuda(now, backend);
        ASSERT_EQ(first_difference(now, last, kResults), "") << "step " << step << " of " << to_string(spec);
      }
    }
  }
}

class CudaGraph : public ::testing::TestWithParam<Case> {};

TEST_P(CudaGraph, ReplaysEqualRunsAtEveryStep) {
  for (const Metadata metadata : {Metadata::kAbsent, Metadata::kLoose}) {
    expect_replays_equal(GetParam(), metadata);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(VariedCases, CudaGraph, ::testing::ValuesIn(varied_cases()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace octavo::testing
