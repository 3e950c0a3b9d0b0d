#include "cuda/prologue/kernel.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cuda/device/element.cuh"
#include "cuda/device/encode.cuh"
#include "cuda/device/overlap.cuh"
#include "cuda/device/records.cuh"
#include "cuda/device/sequences.cuh"
#include "cuda/launch.cuh"
#include "cuda/prologue/rotate.cuh"

namespace octavo::cuda {
namespace {

constexpr int kThreads = 256;

// n / divisor for n below 2^16, by a multiplication.
struct SmallQuotient {
  std::uint32_t divisor = 1, factor = 0;

  SmallQuotient() = default;
  explicit SmallQuotient(std::int32_t divisor_)
      : divisor(static_cast<std::uint32_t>(divisor_)),
        factor(static_cast<std::uint32_t>(((std::uint64_t{1} << 32) + divisor - 1) / divisor)) {}
  __device__ std::int32_t of(std::int32_t n) const {
    return static_cast<std::int32_t>(divisor == 1 ? n : __umulhi(static_cast<std::uint32_t>(n), factor));
  }
};

// How blocks share out the new tokens' K and V. Threads stand over (pairs of units of a row, tokens, heads), K's heads
// before V's: what K needs besides is in warps of its own. A block takes its tokens in steps.
struct Shares {
  std::int32_t pairs = 0;   // of units (eight channels each) in a row
  std::int32_t tokens = 0;  // of a step
  std::int32_t heads = 0;   // of a block, of K as of V; blockIdx.y says which
  std::int32_t steps = 0;   // tokens * steps <= kThreads
  SmallQuotient by_pairs, by_tokens;
};

// What a call asks of a row of K or V.
enum class Path {
  kCopy,     // nothing: units go through as they are
  kRegular,  // another type, or RoPE in whole units; everything at 16-byte boundaries
  kAny,
};

// Where a token goes.
struct Place {
  std::int64_t key, value;  // byte offsets of head 0; -1: not stored
  bool unowned;             // no sequence has the token: its outputs are cleared
};

// The search for one token's place, in two steps: finish() waits for the block table, which begin() starts to read.
class Lookup {
 public:
  // The logical position; -1 if no sequence has the token. Whole warps call it: the tokens of a warp's lanes follow
  // each other, from `first` on; past token_count there are none.
  __device__ std::int32_t begin(const Call& call, const SequenceRecord* records, std::int64_t first) {
    const int lane = threadIdx.x % 32;
    const std::int64_t token = first + lane;
    exists_ = token < call.token_count;
    if (exists_ && call.slot_mapping.data != nullptr) flat_ = call.slot_mapping[token];
    SequenceRecord record{};
    bool found = !exists_;
    if (call.batch_size == call.token_count && exists_) {  // a decode step: mostly a token a sequence
      record = records[token];
      found = record.start == token && records[token + 1].start > token;
    }
    if (!__all_sync(0xffffffffu, found)) {
      const int near = warp_last_not_above(records, call.batch_size, &SequenceRecord::start, first);
      if (!exists_) return -1;
      const int sequence = sequence_near(call, records, near, lane, token);
      if (sequence < 0) return -1;
      record = records[sequence];
      sequence_ = sequence;
    } else {
      sequence_ = static_cast<int>(token);
    }
    if (!exists_) return -1;
    const auto offset = static_cast<std::int32_t>(token - record.start);
    owned_ = offset < record.new_tokens;
    if (!owned_) return -1;
    page_.fetch(call, sequence_, record.past + offset, call.slot_mapping.data == nullptr);
    return call.cos != nullptr ? position_of(call, record, offset) : 0;
  }

  __device__ Place finish(const Call& call) const {
    Place place{-1, -1, exists_ && !owned_};
    if (!owned_) return place;
    std::int64_t block = page_.block(call);
    std::int64_t slot = page_.slot;
    if (call.slot_mapping.data != nullptr) {
      const bool inside = flat_ >= 0 && flat_ < call.num_blocks * call.block_size;
      block = inside ? flat_ / call.block_size : -1;
      slot = flat_ - block * call.block_size;
    }
    if (block < 0) return place;
    place.key = call.k_cache.offset(block, slot, 0);
    place.value = call.v_cache.offset(block, slot, 0);
    return place;
  }

 private:
  // The sequence of a token that stands `ahead` tokens behind one of sequence `near`: mostly the same, or in a decode
  // step the one that is as far ahead. `near` may be -1.
  __device__ static int sequence_near(const Call& call, const SequenceRecord* records, int near, int ahead,
                                      std::int64_t token) {
    if (records[near + 1].start > token) return near;
    const int guess = near + ahead;
    if (guess < call.batch_size && records[guess].start <= token && records[guess + 1].start > token) return guess;
    return last_not_above(records, call.batch_size, &SequenceRecord::start, token);
  }

  bool exists_ = false, owned_ = false;
  int sequence_ = -1;
  std::int64_t flat_ = -1;
  PageEntry page_;
};

// Outputs of the unowned tokens of a block, for the query heads of `kv_heads` KV heads. The whole block works.
template <typename T>
__device__ void clear_outputs(const Call& call, std::int64_t first_token, int count, const bool* unowned,
                              int first_kv_head, int kv_heads) {
  const std::int64_t first_head = static_cast<std::int64_t>(first_kv_head) * call.group;
  const std::int64_t heads = static_cast<std::int64_t>(kv_heads) * call.group;
  for (int i = 0; i < count; ++i) {
    if (!unowned[i]) continue;
    const std::int64_t token = first_token + i;
    T* output = static_cast<T*>(call.output) + (token * call.num_heads + first_head) * call.v_head_size;
    for (std::int64_t c = threadIdx.x; c < heads * call.v_head_size; c += blockDim.x) output[c] = from_float<T>(0.0f);
    if (call.lse == nullptr) continue;
    for (std::int64_t h = threadIdx.x; h < heads; h += blockDim.x)
      call.lse[(first_head + h) * call.token_count + token] = -INFINITY;
  }
}

// Steps of a thread whose reads are under way together.
template <typename T>
inline constexpr int kBatch = sizeof(T) == 2 ? 2 : 1;

// A thread's part: two units of one head's row of K or V, of a token a step.
template <typename T, Path kPath>
struct Walker {
  static constexpr bool kAny = kPath == Path::kAny;

  const Call& call;
  UnitPair units;
  int head, steps;  // steps that have a token
  bool is_value, rows_aligned;
  const T* row;                   // of step 0
  std::int64_t row_stride;        // from one step's to the next
  const std::int64_t* offsets;    // in shared memory: of the tokens' rows in the cache, stride apart
  const std::int32_t* positions;  // likewise
  const float* squares;           // likewise, kThreads apart: sums of squares of the row's pairs of units
  int stride, pairs;
  UnitOf<T> first[kBatch<T>], second[kBatch<T>];  // as they were read

  // Starts to read the units of a batch of steps.
  __device__ void read(int step) {
    const bool aligned = !kAny || rows_aligned;
#pragma unroll
    for (int i = 0; i < kBatch<T>; ++i) {
      const T* from = row + (step + i) * row_stride;
      if (step + i < steps) first[i].load(from + units.first * kUnit, aligned);
      if (step + i < steps && units.second >= 0) second[i].load(from + units.second * kUnit, aligned);
    }
  }

  // All steps, of which the first batch has been read: prepare(step, i), the i-th of a batch, for each of a batch, then
  // store(step, i, offset) for each that is stored.
  template <typename Prepare, typename Store>
  __device__ void walk(const Prepare& prepare, const Store& store) {
#pragma unroll 1
    for (int step = 0;;) {
#pragma unroll
      for (int i = 0; i < kBatch<T>; ++i) {
        if (step + i < steps) prepare(step + i, i);
      }
#pragma unroll
      for (int i = 0; i < kBatch<T>; ++i) {
        const std::int64_t offset = step + i < steps ? offsets[(step + i) * stride] : -1;
        if (offset >= 0) store(step + i, i, offset);
      }
      step += kBatch<T>;
      if (step >= steps) break;
      read(step);
    }
  }

  __device__ void copy(std::byte* data) {
    std::byte* first_to = data + units.first * static_cast<int>(sizeof(UnitOf<T>));
    std::byte* second_to = data + units.second * static_cast<int>(sizeof(UnitOf<T>));
    walk([](int, int) {},
         [&](int, int i, std::int64_t offset) {
           first[i].store(first_to + offset);
           if (units.second >= 0) second[i].store(second_to + offset);
         });
  }

  // By way of floats: normalised, rotated, divided by the scales.
  template <CacheType kType>
  __device__ void convert(std::byte* data, const float* scale, bool per_channel, bool cache_aligned) {
    constexpr int kBytes = unit_bytes(kType);
    constexpr bool kQuantised = kBytes < 16;
    const bool aligned = !kAny || cache_aligned;
    const bool rotated = call.cos != nullptr && !is_value;
    const bool normalised = kAny && call.k_norm != nullptr && !is_value;
    const Divisor divisor(kQuantised && !per_channel ? *scale : 1.0f);
    const float* first_scales = scale + head * call.head_size + units.first * kUnit;
    const float* second_scales = scale + head * call.head_size + units.second * kUnit;
    std::byte* first_to = data + units.first * kBytes;
    std::byte* second_to = data + units.second * kBytes;
    Rotation<T, !kAny> rotation[kBatch<T>];
    walk(
        [&](int step, int i) {
          if (rotated) rotation[i].fetch(call, units, positions[step * stride]);
        },
        [&](int step, int i, std::int64_t offset) {
          float a[kUnit], b[kUnit];
          first[i].decode(a);
          second[i].decode(b);
          float factor = 1.0f;
          if (normalised) {
            factor = norm_factor(step);
            normalise(units.first, factor, a);
            if (units.second >= 0) normalise(units.second, factor, b);
          }
          if (rotated) rotation[i].apply(call, units, row + step * row_stride, factor, a, b);
          if constexpr (kQuantised) {
            if (per_channel) {
              divide_by_channel(first_scales, !kAny, a);
              if (units.second >= 0) divide_by_channel(second_scales, !kAny, b);
            } else {
              divide_by(divisor, a);
              divide_by(divisor, b);
            }
          }
          store_unit_as<kType>(a, aligned, first_to + offset);
          if (units.second >= 0) store_unit_as<kType>(b, aligned, second_to + offset);
        });
  }

  __device__ float norm_factor(int step) const {
    float sum = 0.0f;
    for (int p = 0; p < pairs; ++p) sum += squares[step * kThreads + p];
    return 1.0f / sqrtf(sum / static_cast<float>(call.head_size) + call.norm_epsilon);
  }
  __device__ void normalise(int unit, float factor, float (&x)[kUnit]) const {
    float weights[kUnit];
    load_unit(static_cast<const T*>(call.k_norm) + unit * kUnit, false, weights);
#pragma unroll
    for (int c = 0; c < kUnit; ++c) x[c] *= factor * weights[c];
  }
};

// The sums of the squares of a thread's channels, a step at a time: the rows are read a second time later, from L1.
template <typename T>
__device__ void sum_squares(Walker<T, Path::kAny> walker, float* sums) {
  const auto square = [](const UnitOf<T>& unit) {
    float x[kUnit];
    float sum = 0.0f;
    unit.decode(x);
#pragma unroll
    for (int c = 0; c < kUnit; ++c) sum = fmaf(x[c], x[c], sum);
    return sum;
  };
#pragma unroll 1
  for (int step = 0; step < walker.steps; step += kBatch<T>) {
    if (step > 0) walker.read(step);
#pragma unroll
    for (int i = 0; i < kBatch<T>; ++i) {
      if (step + i >= walker.steps) continue;
      const float second = walker.units.second >= 0 ? square(walker.second[i]) : 0.0f;
      sums[(step + i) * kThreads + threadIdx.x] = square(walker.first[i]) + second;
    }
  }
}

OCTAVO_HOST_DEVICE constexpr std::size_t record_bytes(std::int32_t batch) {
  return (static_cast<std::size_t>(batch) + 1) * sizeof(SequenceRecord);
}

// Blocks that an SM should hold at once: copies are bound by memory, and more blocks keep more reads under way;
// conversions are faster with fewer blocks than with spilled registers (int8 without RoPE took 32 us at 80 registers
// and 22 us at 127).
constexpr int min_blocks(Path path) {
  return path == Path::kCopy ? 4 : 2;
}

template <typename T, Path kPath>
__global__ void __launch_bounds__(kThreads, min_blocks(kPath))
    prologue(const __grid_constant__ Call call, const __grid_constant__ Shares shares) {
  extern __shared__ __align__(8) std::byte dynamic[];  // records, where it makes its own, and squares
  const bool is_first = call.scratch.records == nullptr;
  auto* const own_records = reinterpret_cast<SequenceRecord*>(dynamic);
  auto* const squares = reinterpret_cast<float*>(dynamic + (is_first ? record_bytes(call.batch_size) : 0));
  __shared__ std::int64_t key_offsets[kThreads], value_offsets[kThreads];
  __shared__ std::int32_t positions[kThreads];
  __shared__ bool unowned[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  const int over_pairs = shares.by_pairs.of(thread);
  const int over_tokens = shares.by_tokens.of(over_pairs);
  const int pair = thread - over_pairs * shares.pairs;
  const int at = over_pairs - over_tokens * shares.tokens;
  const bool is_value = over_tokens >= shares.heads;
  const int first_head = static_cast<int>(blockIdx.y) * shares.heads;
  const int head = first_head + (is_value ? over_tokens - shares.heads : over_tokens);
  const int block_tokens = shares.tokens * shares.steps;
  const std::int64_t first_token = static_cast<std::int64_t>(blockIdx.x) * block_tokens;
  // Threads past the last head have no steps; the last block's may have fewer.
  const bool busy = over_tokens < (call.latent ? 1 : 2) * shares.heads && head < call.kv_num_heads;
  const std::int64_t left = busy ? call.token_count - first_token - at : 0;
  const auto steps = static_cast<int>(
      min(static_cast<std::int64_t>(shares.steps), left > 0 ? (left + shares.tokens - 1) / shares.tokens : 0));

  // Values, not references: a choice between two parameters would be read through a pointer each time.
  const std::int64_t token_bytes = is_value ? call.value.token_bytes : call.key.token_bytes;
  const std::int64_t in_token = head * (is_value ? call.value.head_bytes : call.key.head_bytes);
  const std::byte* rows = (is_value ? call.value.data : call.key.data) + (first_token + at) * token_bytes + in_token;
  Walker<T, kPath> walker{call,
                          UnitPair(call, pair),
                          head,
                          steps,
                          is_value,
                          is_value ? call.value.aligned : call.key.aligned,
                          reinterpret_cast<const T*>(rows),
                          shares.tokens * token_bytes / static_cast<std::int64_t>(sizeof(T)),
                          (is_value ? value_offsets : key_offsets) + at,
                          positions + at,
                          squares + thread - pair,
                          shares.tokens,
                          shares.pairs,
                          {},
                          {}};
  // Behind the schedule kernel, whatever came before the call is complete.
  if (is_first) wait_for_earlier_kernels();
  walker.read(0);

  // Where the tokens go is looked up while the first rows are on their way.
  if (!is_first) wait_for_earlier_kernels();
  let_next_kernel_start();
  if (is_first) {
    if (blockIdx.x == 0 && blockIdx.y == 0) clear_counters(call);
    __shared__ std::int64_t of_warps[kMaxWarps];
    make_records(call, own_records, of_warps);
  }
  bool any_unowned = false;
  if (thread / 32 * 32 < block_tokens) {
    Lookup lookup;
    const std::int32_t position =
        lookup.begin(call, is_first ? own_records : call.scratch.records, first_token + thread / 32 * 32);
    const Place place = lookup.finish(call);
    if (thread < block_tokens) {
      key_offsets[thread] = place.key;
      value_offsets[thread] = place.value;
      positions[thread] = position;
      unowned[thread] = any_unowned = place.unowned;
    }
  }
  if constexpr (kPath == Path::kAny) {
    if (call.k_norm != nullptr && !is_value) sum_squares(walker, squares);
  }
  if (__syncthreads_or(any_unowned)) {
    const int kv_heads = min(call.kv_num_heads - first_head, shares.heads);
    clear_outputs<T>(call, first_token, block_tokens, unowned, first_head, kv_heads);
  }
  if (steps == 0) return;
  const std::int64_t in_slot = head * (is_value ? call.v_cache.head_bytes : call.k_cache.head_bytes);
  std::byte* data = (is_value ? call.v_cache.data : call.k_cache.data) + in_slot;
  if constexpr (kPath == Path::kCopy) {
    walker.copy(data);
  } else {
    const float* scale = is_value ? call.v_cache.scale : call.k_cache.scale;
    const bool per_channel = is_value ? call.v_cache.per_channel : call.k_cache.per_channel;
    const bool aligned = is_value ? call.v_cache.aligned : call.k_cache.aligned;
    const auto convert_to = [&](auto type) {
      walker.template convert<decltype(type)::value>(data, scale, per_channel, aligned);
    };
    switch (is_value ? call.v_cache.type : call.k_cache.type) {
      case CacheType::kFloat16: convert_to(std::integral_constant<CacheType, CacheType::kFloat16>()); return;
      case CacheType::kBFloat16: convert_to(std::integral_constant<CacheType, CacheType::kBFloat16>()); return;
      case CacheType::kInt8: convert_to(std::integral_constant<CacheType, CacheType::kInt8>()); return;
      case CacheType::kFloat8E4M3FN: convert_to(std::integral_constant<CacheType, CacheType::kFloat8E4M3FN>()); return;
      case CacheType::kInt4: convert_to(std::integral_constant<CacheType, CacheType::kInt4>()); return;
      case CacheType::kFloat4E2M1: convert_to(std::integral_constant<CacheType, CacheType::kFloat4E2M1>()); return;
      default: convert_to(std::integral_constant<CacheType, CacheType::kFloat32>()); return;
    }
  }
}

// Eight channels of each row, and of its scales, start at 16-byte boundaries.
bool in_vectors(const TokenRows& rows, const Cache& cache) {
  const bool scales = !cache.per_channel || reinterpret_cast<std::uintptr_t>(cache.scale) % 16 == 0;
  return rows.aligned && cache.aligned && scales;
}

template <typename T>
Path path_of(const Call& call) {
  const bool vectors = in_vectors(call.key, call.k_cache) && (call.latent || in_vectors(call.value, call.v_cache));
  if (call.k_norm != nullptr || !vectors) return Path::kAny;
  if (call.cos != nullptr) return rotates_units(call) && angles_aligned(call) ? Path::kRegular : Path::kAny;
  return holds<T>(call.k_cache.type) && holds<T>(call.v_cache.type) ? Path::kCopy : Path::kRegular;
}

// Blocks that leave no multiprocessor idle: a block takes several steps only where there are more than these.
// Conversions have fewer blocks on an SM, and more to do before the first step.
constexpr std::int64_t many_blocks(Path path) {
  return path == Path::kCopy ? 512 : 256;
}
constexpr std::int32_t max_steps(Path path) {
  return path == Path::kCopy ? 8 : 16;
}

template <typename T, Path kPath>
cudaError_t launch_for(const Call& call, cudaStream_t stream) {
  const std::int32_t units = call.head_size / kUnit;
  const std::int32_t kinds = call.latent ? 1 : 2;
  Shares shares;
  shares.pairs = (units + 1) / 2;
  shares.heads = std::clamp(kThreads / (shares.pairs * kinds), 1, call.kv_num_heads);
  shares.tokens = kThreads / (shares.pairs * kinds * shares.heads);
  shares.by_pairs = SmallQuotient(shares.pairs);
  shares.by_tokens = SmallQuotient(shares.tokens);
  const std::int32_t slices = (call.kv_num_heads + shares.heads - 1) / shares.heads;
  const std::int64_t all_steps = (call.token_count + std::int64_t{shares.tokens} - 1) / shares.tokens;
  const std::int64_t most = std::min(max_steps(kPath), kThreads / shares.tokens);
  shares.steps = static_cast<std::int32_t>(std::clamp<std::int64_t>(all_steps * slices / many_blocks(kPath), 1, most));
  const dim3 grid(static_cast<unsigned>((all_steps + shares.steps - 1) / shares.steps), static_cast<unsigned>(slices));
  const auto threads = static_cast<unsigned>((shares.pairs * kinds * shares.heads * shares.tokens + 31) / 32 * 32);
  const std::size_t records = call.scratch.records == nullptr ? record_bytes(call.batch_size) : 0;
  const std::size_t squares = call.k_norm != nullptr ? sizeof(float) * kThreads * shares.steps : 0;
  return launch_early(call.scratch.overlaps, prologue<T, kPath>, grid, threads, records + squares, stream, call,
                      shares);
}

template <typename T>
cudaError_t launch_for(const Call& call, cudaStream_t stream) {
  switch (path_of<T>(call)) {
    case Path::kCopy: return launch_for<T, Path::kCopy>(call, stream);
    case Path::kRegular: return launch_for<T, Path::kRegular>(call, stream);
    default: return launch_for<T, Path::kAny>(call, stream);
  }
}

}  // namespace

cudaError_t launch_prologue(const Call& call, cudaStream_t stream) {
  switch (call.element_type) {
    case ElementType::kFloat16: return launch_for<__half>(call, stream);
    case ElementType::kBFloat16: return launch_for<__nv_bfloat16>(call, stream);
    default: return launch_for<float>(call, stream);
  }
}

}  // namespace octavo::cuda
