#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "contract/message.h"
#include "cuda/backend.h"
#include "cuda/call.h"
#include "cuda/decode/kernel.h"
#include "cuda/general/attention.h"
#include "cuda/runtime.h"
#include "cuda/schedule/kernel.h"
#include "cuda/start.h"
#include "cuda/tensor_map.h"

namespace octavo::cuda {
namespace {

using contract::cat;
using decode::Instance;
using decode::Work;

constexpr std::int64_t kPieceBytes = 16;
constexpr FeatureSet kFeatures = Feature::kPackedQkv | Feature::kSlotMapping | Feature::kRope | Feature::kQkNorm |
                                 Feature::kHeadSink | Feature::kSoftcap | Feature::kLocalWindow | Feature::kNonCausal |
                                 Feature::kLse | Feature::kQuantizedCache | Feature::kPerChannelScale |
                                 Feature::kFourBitCache | Feature::kStridedCache | Feature::kInt64Indices |
                                 Feature::kSmallBlocks;

const Instance kInstances[] = {
#define OCTAVO_DECODE_FLOAT16
#define OCTAVO_DECODE_BFLOAT16
#define OCTAVO_DECODE_INT8
#define OCTAVO_DECODE_FLOAT8
#define OCTAVO_DECODE_INT4
#define OCTAVO_DECODE_INSTANCE(type, head, tiles) decode::make_instance<CacheType::type, head, tiles>(),
#include "cuda/decode/instances.inc"
#undef OCTAVO_DECODE_INSTANCE
};

// Blocks of the prologue check the lengths of so many sequences in less time than a kernel of its own would take.
constexpr std::int64_t kSmallBatch = 256;

// New tokens of a sequence that an instance is chosen for; more only take more passes over the keys.
std::int64_t typical_tokens(const Problem& problem) {
  const std::int64_t batch = std::max<std::int64_t>(problem.batch_size, 1);
  const std::int64_t average = (problem.token_count + batch - 1) / batch;
  return problem.max_query_len_bound <= decode::kMaxTokens ? problem.max_query_len_bound : average;
}

// Whether a sequence may have more new tokens than are this kernel's: those are left to the general attention.
bool has_long_sequences(const Problem& problem) {
  return problem.max_query_len_bound > decode::kMaxTokens;
}

// The smallest that has room for a head and, if any has, for all rows; nullptr where heads are too large. Kernels of
// one row tile do not share weights (shape.h): they are for calls in which no sequence may have more rows. (Where one
// has more than the bound promised the result is right, with other bits.)
const Instance* choose_decode_instance(const Problem& problem) {
  const std::int64_t bound = std::min<std::int64_t>(problem.max_query_len_bound, decode::kMaxTokens);
  const std::int64_t most = problem.group_size() * bound;
  const std::int64_t typical = problem.group_size() * typical_tokens(problem);
  const std::int64_t rows =
      most <= decode::kOneTileRows ? most : std::max<std::int64_t>(typical, decode::kOneTileRows + 1);
  const Instance* chosen = nullptr;
  for (const Instance& instance : kInstances) {
    if (instance.type != problem.k_cache.logical || instance.head < problem.head_size) continue;
    if (chosen != nullptr && instance.head > chosen->head) continue;
    if (chosen == nullptr || instance.head < chosen->head || chosen->rows < rows) chosen = &instance;
  }
  return chosen;
}

std::string refuse(const Problem& problem) {
  const CacheType type = problem.k_cache.logical;
  if (problem.element_type == ElementType::kFloat32) return "query must be float16 or bfloat16";
  if (problem.v_cache.logical != type) {
    return cat("key_cache and value_cache must hold the same type, got ", name(type), " and ",
               name(problem.v_cache.logical));
  }
  const bool wide = type == CacheType::kFloat16 || type == CacheType::kBFloat16;
  const CacheType own = problem.element_type == ElementType::kFloat16 ? CacheType::kFloat16 : CacheType::kBFloat16;
  if ((wide && type != own) || type == CacheType::kFloat32 || type == CacheType::kFloat4E2M1) {
    return cat("caches must hold ", name(own), ", int8, float8e4m3fn or int4, got ", name(type));
  }
  const Instance* instance = choose_decode_instance(problem);
  if (instance == nullptr) return cat("head_size must be at most 256, got ", problem.head_size);
  if (row_bytes(type, problem.head_size) % kPieceBytes != 0) {
    return cat("rows of the caches must be multiples of 16 bytes, got ", row_bytes(type, problem.head_size));
  }
  if (problem.batch_size > decode::kMaxBatch) {
    return cat("batch_size must be at most ", decode::kMaxBatch, ", got ", problem.batch_size);
  }
  if (problem.num_blocks >= UINT32_MAX) return cat("num_blocks must be below 2^32 - 1, got ", problem.num_blocks);
  if (problem.token_count > INT32_MAX / problem.num_heads) {
    return cat("token_count * num_heads must be below 2^31, got ", problem.token_count, " * ", problem.num_heads);
  }
  return has_long_sequences(problem) ? refuse_grid(problem) : std::string();
}

std::string refuse_device(const Problem& problem, int device_ordinal) {
  DeviceFacts facts;
  if (std::string reason = read_usable_device(device_ordinal, facts); !reason.empty()) return reason;
  // Of all kernels that a call with these heads may get, so that the bound and what is beside a sequence decide
  // nothing.
  const Instance& chosen = *choose_decode_instance(problem);
  int bytes = 0;
  for (const Instance& instance : kInstances) {
    if (instance.type != chosen.type || instance.head != chosen.head) continue;
    bytes = std::max(bytes, instance.shared_bytes(static_cast<int>(problem.batch_size)));
  }
  if (bytes <= facts.shared_memory) return has_long_sequences(problem) ? refuse_size(problem, facts) : std::string();
  return cat("head_size = ", problem.head_size, " needs ", bytes, " bytes of shared memory, device ", device_ordinal,
             " has ", facts.shared_memory);
}

// Whether a sequence can have more than one segment: only then are there nodes to fold.
bool has_tree(const Problem& problem) {
  return problem.max_kv_len_bound > 1 << decode::kSegmentShift;
}

// Levels of the tree over the segments of the longest sequence that the bound allows.
std::int32_t level_count(const Problem& problem) {
  const auto longest = static_cast<std::int32_t>(std::min<std::int64_t>(problem.max_kv_len_bound, INT32_MAX));
  std::int32_t levels = 1;
  while ((std::int64_t{1} << (levels + decode::segment_shift(longest, problem.local_window_size > 0))) <
         std::int64_t{longest} + decode::kRounded)
    ++levels;
  // Shorter sequences have shorter segments: up to 17 of them.
  return std::max(levels, 5);
}

// The workspace: the schedule's records where there is a schedule kernel, with what the general attention needs where
// it may run; then this kernel's counters, states and sums of partial results.
std::size_t carve_work(const Problem& problem, const Instance& instance, void* data, Scratch& scratch, Work& work) {
  Carver carver(data);
  if (has_long_sequences(problem)) {
    carve(problem, carver, scratch);
  } else if (problem.batch_size > kSmallBatch) {
    scratch.records = carver.take<SequenceRecord>(problem.batch_size + 1);
  }
  const std::int64_t partials = has_tree(problem) ? decode::kPartials : 0;
  work.levels = has_tree(problem) ? level_count(problem) : 0;
  const std::int64_t nodes = std::int64_t{decode::kMaxBlocks} * work.levels * instance.all_rows * instance.head / 4;
  const std::int64_t rows = partials * instance.all_rows;
  work.next_unit = carver.take<std::uint32_t>(partials + 1);
  work.arrived = work.next_unit == nullptr ? nullptr : work.next_unit + 1;
  work.states = carver.take<float2>(rows);
  work.sums = carver.take<float>(rows * instance.head);
  work.stack_states = carver.take<float2>(nodes);
  work.stack_sums = carver.take<float4>(nodes);
  work.partials = static_cast<std::int32_t>(partials);
  return carver.used();
}

std::size_t workspace_bytes(const Problem& problem, int /*concurrency*/) {
  Scratch scratch;
  Work work;
  return carve_work(problem, *choose_decode_instance(problem), nullptr, scratch, work);
}

// Strides in pieces.
decode::Pieces pieces_of(const Cache& cache) {
  return {static_cast<std::uint32_t>(cache.block_bytes / kPieceBytes),
          static_cast<std::uint32_t>(cache.slot_bytes / kPieceBytes)};
}

// Whether rows of a cache are pieces of 16 bytes whose numbers fit 32 bits. Strides of an axis of one are never used.
bool has_pieces(const Problem& problem, const Cache& cache) {
  const std::int64_t block = problem.num_blocks > 1 ? cache.block_bytes : 0;
  const std::int64_t slot = problem.block_size > 1 ? cache.slot_bytes : 0;
  const std::int64_t head = problem.kv_num_heads > 1 ? cache.head_bytes : 0;
  const std::int64_t last = block * (problem.num_blocks - 1) + slot * (problem.block_size - 1);
  return (reinterpret_cast<std::uintptr_t>(cache.data) | static_cast<std::uintptr_t>(block | slot | head)) %
                 kPieceBytes ==
             0 &&
         last / kPieceBytes < (std::int64_t{1} << 32) - 1;
}

// Maps of both caches, where the device has a copy engine for them and it can read these ones.
void map_caches(const Problem& problem, const Instance& instance, const Call& call, Work& work, decode::Maps& maps) {
  const bool joined = instance.heads > 1;
  if (joined && call.kv_num_heads > 1 &&
      work.head_bytes != static_cast<std::int32_t>(row_bytes(instance.type, instance.head)))
    return;
  const std::int64_t factor = problem.block_size & -problem.block_size;  // the largest power of two in it
  // Keys of a window begin at a multiple of kWindowKeys, others at 0: boxes of so many stay within their blocks.
  const std::int64_t most = call.window > 0 ? decode::kWindowKeys : instance.tile_keys;
  const CacheBox box{.slots = static_cast<int>(std::min(factor, most))};
  work.box_keys = box.slots;
  work.boxes = make_tensor_map(call, call.k_cache, box, joined, maps.key) &&
               make_tensor_map(call, call.v_cache, box, joined, maps.value);
}

Status run(const Problem& problem, const Arguments& arguments, Workspace workspace, int /*concurrency*/,
           const RunContext& context) noexcept {
  if (problem.token_count == 0) return {};
  const auto stream = static_cast<cudaStream_t>(context.stream);
  DeviceFacts facts;
  if (Status status = read_current_device(facts); !status.ok()) return status;
  const Instance& instance = *choose_decode_instance(problem);
  Scratch scratch;
  Work work;
  carve_work(problem, instance, workspace.data, scratch, work);
  // Without the general attention every sequence is this kernel's, whatever the bound promised.
  scratch.decode_tokens = has_long_sequences(problem) ? decode::kMaxTokens : INT32_MAX;
  const cuda::Instance long_instance = cuda::choose_instance(problem, facts.shared_memory);
  scratch.tile_rows = std::max(long_instance.rows, 1);
  scratch.counters = work.next_unit;
  scratch.counter_count = work.partials + 1;
  scratch.overlaps = schedule_waits(facts.compute_capability);
  const Call call = make_call(problem, arguments, scratch);
  work.head_groups = (call.kv_num_heads + instance.heads - 1) / instance.heads;
  work.head_bytes = static_cast<std::int32_t>(row_bytes(call.k_cache.type, problem.head_size));
  work.pieces = has_pieces(problem, call.k_cache) && has_pieces(problem, call.v_cache);
  decode::Maps maps;
  if (scratch.overlaps) map_caches(problem, instance, call, work, maps);  // code of 9.0 has both
  work.key = pieces_of(call.k_cache);
  work.value = pieces_of(call.v_cache);
  work.block_keys = static_cast<std::uint32_t>(std::min<std::int64_t>(problem.block_size, std::int64_t{1} << 31));
  const std::int64_t ids = call.block_table.wide ? std::int64_t{UINT32_MAX} : std::int64_t{1} << 31;
  work.block_limit = static_cast<std::uint32_t>(std::min(problem.num_blocks, ids));
  work.window =
      call.causal && call.window > 0 ? static_cast<std::int32_t>(std::min<std::int64_t>(call.window, INT32_MAX)) : 0;
  work.shared_limit = facts.shared_memory;
  // Three blocks of an SM never fit. Where they did, those of a kernel that starts early would crowd onto the SMs that
  // are done first, two on one and none on another (1.25 times the time, measured).
  work.shared_least = facts.shared_memory_per_sm / 3 - facts.shared_memory_reserved + 1;
  const int bytes = std::max(instance.shared_bytes(call.batch_size), work.shared_least);
  const int resident =
      std::clamp(facts.shared_memory_per_sm / (bytes + facts.shared_memory_reserved), 1, instance.blocks_per_sm);
  work.blocks = std::min(facts.multiprocessors * resident, decode::kMaxBlocks);
  work.by_head_groups = Quotient(work.head_groups);
  work.by_group = Quotient(call.group);
  work.by_blocks = Quotient(work.blocks);
  work.by_block_keys = Quotient(work.block_keys);

  if (Status status = launch_start(call, stream); !status.ok()) return status;
  if (problem.batch_size == 0) return {};
  if (has_long_sequences(problem)) {
    if (Status status = launch_general_attention(problem, call, long_instance, facts, stream); !status.ok())
      return status;
  }
  return to_status(instance.launch(call, work, maps, stream), "the launch of the decode kernel");
}

}  // namespace

const dispatch::Backend kDecodeBackend = {
    "cuda_decode",
    "Up to 8 new tokens a sequence over 16-, 8- and 4-bit caches at the memory's rate; longer sequences as "
    "cuda_general.",
    DeviceKind::kCuda,
    kFeatures,
    refuse,
    workspace_bytes,
    run,
    refuse_device};

}  // namespace octavo::cuda
