#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/backend.h"
#include "cuda/call.h"
#include "cuda/general/attention.h"
#include "cuda/general/tuning.h"
#include "cuda/runtime.h"
#include "cuda/schedule/kernel.h"
#include "cuda/start.h"

namespace octavo::cuda {
namespace {

// Named one by one, so that a new feature is not taken for supported before somebody has looked.
constexpr FeatureSet kFeatures = Feature::kPackedQkv | Feature::kSlotMapping | Feature::kRope | Feature::kQkNorm |
                                 Feature::kHeadSink | Feature::kSoftcap | Feature::kLocalWindow | Feature::kNonCausal |
                                 Feature::kAttentionBias | Feature::kQueryPositions | Feature::kOutputQk |
                                 Feature::kLse | Feature::kLatent | Feature::kQuantizedCache |
                                 Feature::kPerChannelScale | Feature::kFourBitCache | Feature::kStridedCache |
                                 Feature::kInt64Indices | Feature::kSmallBlocks;

std::string refuse_device(const Problem& problem, int device_ordinal) {
  DeviceFacts facts;
  if (std::string reason = read_usable_device(device_ordinal, facts); !reason.empty()) return reason;
  return refuse_size(problem, facts);
}

std::size_t workspace_bytes(const Problem& problem, int /*concurrency*/) {
  Scratch scratch;
  Carver carver(nullptr);
  return carve(problem, carver, scratch);
}

// Work on the stream only: nothing is allocated, nothing waits, and every size comes from the Problem.
Status run(const Problem& problem, const Arguments& arguments, Workspace workspace, int /*concurrency*/,
           const RunContext& context) noexcept {
  if (problem.token_count == 0) return {};
  const auto stream = static_cast<cudaStream_t>(context.stream);
  DeviceFacts facts;
  if (Status status = read_current_device(facts); !status.ok()) return status;
  const Instance instance = choose_instance(problem, facts.shared_memory);
  if (instance.rows == 0) return {StatusCode::kInternal, "CUDA: the plan was made for a device with larger blocks"};
  Scratch scratch;
  Carver carver(workspace.data);
  carve(problem, carver, scratch);
  scratch.tile_rows = instance.rows;
  scratch.overlaps = schedule_waits(facts.compute_capability);
  const Call call = make_call(problem, arguments, scratch);

  if (Status status = launch_start(call, stream); !status.ok()) return status;
  if (call.output_qk != nullptr) {
    const auto bytes =
        static_cast<std::size_t>(arguments.output_qk.element_count()) * size_in_bytes(problem.output_qk_type);
    if (const cudaError_t error = cudaMemsetAsync(call.output_qk, 0, bytes, stream); error != cudaSuccess) {
      return to_status(error, "the clearing of output_qk");
    }
  }
  if (problem.batch_size == 0) return {};
  return launch_general_attention(problem, call, instance, facts, stream);
}

}  // namespace

const dispatch::Backend kGeneralBackend = {
    "cuda_general",
    "Streaming attention on tensor cores (float32: on ordinary ones) for the whole contract.",
    DeviceKind::kCuda,
    kFeatures,
    refuse_grid,
    workspace_bytes,
    run,
    refuse_device};

}  // namespace octavo::cuda
