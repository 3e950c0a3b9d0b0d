// Fuzzing of validate(), plan() and run() with hostile Arguments: whatever the shapes, types, pointers, values and
// enumerators, a call ends with a Status, refused calls have written nothing, and nothing is written outside of a
// tensor. Build with OCTAVO_SANITIZE=address,undefined to see reads.
//   octavo_fuzz_validate [--seconds N] [--seed S]   draws calls S, S+1, ... for N seconds
//   octavo_fuzz_validate --case S                   runs one again
// Each call that may run does so on a random backend and executor.
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "support/call.h"
#include "support/case_list.h"
#include "support/executors.h"
#include "support/random.h"
#include "support/run.h"

namespace octavo::testing {
namespace {

constexpr std::int64_t kExtremes[] = {0,
                                      1,
                                      -1,
                                      2,
                                      3,
                                      7,
                                      8,
                                      16,
                                      1 << 20,
                                      std::numeric_limits<std::int32_t>::max(),
                                      std::int64_t{1} << 32,
                                      std::int64_t{1} << 40,
                                      std::numeric_limits<std::int64_t>::max(),
                                      std::numeric_limits<std::int64_t>::min()};

std::int64_t extreme(Random& random) {
  return kExtremes[random.below(static_cast<std::int64_t>(std::size(kExtremes)))];
}

// Bends a view: one extent, stride, the rank, the type, the pointer, or all of it.
template <typename View>
void bend(Random& random, View& view) {
  const auto axis = static_cast<std::size_t>(random.below(kMaxRank));
  switch (random.below(7)) {
    case 0: view.shape[axis] = extreme(random); break;
    case 1: view.rank = static_cast<int>(random.between(-1, 7)); break;
    case 2: view.type = static_cast<ElementType>(random.below(12)); break;
    case 3: view = {}; break;
    case 4: view.data = nullptr; break;
    case 5: view.strides[axis] = extreme(random); break;
    default: view.shape[axis] = random.below(40); break;
  }
}

void bend_attributes(Random& random, Attributes& a) {
  std::int64_t* const integers[] = {&a.num_heads,     &a.kv_num_heads, &a.local_window_size,
                                    &a.is_causal,     &a.do_rotary,    &a.rotary_interleaved,
                                    &a.rotary_offset, &a.v_head_size,  &a.qk_output};
  float* const reals[] = {&a.scale, &a.softcap, &a.qk_norm_epsilon};
  constexpr float kReals[] = {0.0f, -1.0f, 1e30f, std::numeric_limits<float>::quiet_NaN(),
                              std::numeric_limits<float>::infinity()};
  switch (random.below(5)) {
    case 0: *integers[random.below(9)] = extreme(random); break;
    case 1: *reals[random.below(3)] = kReals[random.below(5)]; break;
    case 2: (random.chance(0.5) ? a.k_quant_type : a.v_quant_type) = static_cast<QuantType>(random.below(5)); break;
    case 3: (random.chance(0.5) ? a.k_cache_dtype : a.v_cache_dtype) = static_cast<CacheType>(random.below(10)); break;
    default: a.kv_cache_layout = static_cast<CacheLayout>(random.below(4)); break;
  }
}

// Whether every view still lies in the memory of its buffer: validation cannot know how large a caller's buffer is, so
// a call that passes validation is only run when this holds.
bool inside(Call& call, const char* name, const TensorView& view) {
  if (!view.present() || view.data == nullptr) return true;
  std::string owner = name;
  if (owner == "value_cache" && !call.has_buffer("value_cache")) owner = "key_cache";  // K and V interleaved
  if (!call.has_buffer(owner)) return false;
  const GuardedBuffer& buffer = call.buffer(owner);
  const auto* data = static_cast<const std::byte*>(view.data);
  if (data < buffer.data() || data > buffer.data() + buffer.size()) return false;
  double last = 0.0, count = 1.0;  // doubles cannot wrap
  for (int axis = 0; axis < view.rank && axis < kMaxRank; ++axis) {
    const auto i = static_cast<std::size_t>(axis);
    count *= static_cast<double>(view.shape[i]);
    last += static_cast<double>(view.shape[i] - 1) * static_cast<double>(view.strides[i]);
  }
  if (count <= 0.0) return true;
  const double bytes = (last + 1.0) * static_cast<double>(size_in_bytes(view.type));
  return bytes <= static_cast<double>(buffer.data() + buffer.size() - data);
}

template <typename Visit>
void for_each_input(Arguments& a, Visit visit) {
  visit("query", a.query);
  visit("key", a.key);
  visit("value", a.value);
  visit("cumulative_sequence_length", a.cumulative_sequence_length);
  visit("past_seqlens", a.past_seqlens);
  visit("block_table", a.block_table);
  visit("cos_cache", a.cos_cache);
  visit("sin_cache", a.sin_cache);
  visit("slot_mapping", a.slot_mapping);
  visit("head_sink", a.head_sink);
  visit("q_norm_weight", a.q_norm_weight);
  visit("k_norm_weight", a.k_norm_weight);
  visit("k_scale", a.k_scale);
  visit("v_scale", a.v_scale);
  visit("attention_metadata", a.attention_metadata);
  visit("query_positions", a.query_positions);
  visit("attention_bias", a.attention_bias);
}

template <typename Visit>
void for_each_output(Arguments& a, Visit visit) {
  visit("key_cache", a.key_cache);
  visit("value_cache", a.value_cache);
  visit("output", a.output);
  visit("output_qk", a.output_qk);
  visit("lse", a.lse);
}

void bend_one(Random& random, Call& call) {
  const std::int64_t target = random.below(23);
  std::int64_t index = 0;
  const auto maybe = [&](const char*, auto& view) {
    if (index++ == target) bend(random, view);
  };
  for_each_input(call.arguments, maybe);
  for_each_output(call.arguments, maybe);
  if (target == 22) bend_attributes(random, call.attributes);
}

// Writes a wild number into one of the integer tensors. attention_metadata included: it is the caller's promise.
void bend_value(Random& random, Call& call) {
  constexpr const char* kIntegers[] = {
      "cumulative_sequence_length", "past_seqlens", "block_table", "slot_mapping", "query_positions",
      "attention_metadata"};
  const char* name = kIntegers[random.below(6)];
  if (!call.has_buffer(name) || call.buffer(name).size() < 8) return;
  GuardedBuffer& buffer = call.buffer(name);
  const std::int64_t value = random.chance(0.5) ? extreme(random) : random.between(-3, 400);
  const auto width = static_cast<std::int64_t>(random.chance(0.5) ? sizeof(std::int32_t) : sizeof(std::int64_t));
  const std::int64_t index = random.below(static_cast<std::int64_t>(buffer.size()) / width);
  std::memcpy(buffer.data() + index * width, &value, static_cast<std::size_t>(width));  // little endian
}

struct Counts {
  std::int64_t calls = 0, refused = 0, ran = 0;
};

std::string run_case(std::uint64_t seed, Counts& counts) {
  Random random(seed * 977 + 5);
  Call call(random_case(seed));
  for (std::int64_t i = random.below(3); i > 0; --i) bend_one(random, call);
  for (std::int64_t i = random.below(3); i > 0; --i) bend_value(random, call);
  ++counts.calls;

  const Call::Snapshot before = call.snapshot();
  Problem problem;
  const Status status = validate(call.arguments, call.attributes, problem);
  if (!status.ok()) {
    ++counts.refused;
    if (status.message().empty()) return "a refusal without a message";
    if (status.code() != StatusCode::kInvalidArgument) return "an unexpected code for: " + status.message();
    return call.changes_since(before).empty() ? "" : "validate() wrote";
  }
  const Acceptance acceptance = ask_backends(call);
  bool runnable = true;
  const auto check = [&](const char* name, const auto& view) { runnable = runnable && inside(call, name, view); };
  for_each_input(call.arguments, check);
  for_each_output(call.arguments, check);
  if (!runnable) return {};
  // One of the backends that accept, or the one that plan() chooses (which may refuse: nobody accepts).
  std::string backend;
  const auto accepting = static_cast<std::int64_t>(acceptance.accepting.size());
  if (accepting > 0 && random.chance(0.8)) {
    backend = acceptance.accepting[static_cast<std::size_t>(random.below(accepting))];
  }
  const int threads = static_cast<int>(random.between(1, 4));
  std::unique_ptr<Executor> executor = std::make_unique<ReverseExecutor>(threads);
  if (random.chance(0.3)) executor = std::make_unique<ShufflingExecutor>(threads, seed);
  const Status run_status = run(call, {.backend = backend, .executor = executor.get()});
  if (run_status.code() == StatusCode::kInternal) {
    return backend + " on " + std::to_string(threads) + " lanes: internal error: " + run_status.message();
  }
  if (!run_status.ok() && !call.changes_since(before).empty()) {
    return "wrote to " + call.changes_since(before) + " although it refused: " + run_status.message();
  }
  ++(run_status.ok() ? counts.ran : counts.refused);
  const std::string broken = call.broken_guards();
  return broken.empty() ? "" : "wrote outside of " + broken;
}

}  // namespace
}  // namespace octavo::testing

int main(int argc, char** argv) {
  double seconds = 10.0;
  std::uint64_t seed = 1;
  bool single = false;
  for (int i = 1; i < argc; i += 2) {
    const bool has_value = i + 1 < argc;
    if (has_value && std::strcmp(argv[i], "--seconds") == 0) {
      seconds = std::strtod(argv[i + 1], nullptr);
    } else if (has_value && (std::strcmp(argv[i], "--seed") == 0 || std::strcmp(argv[i], "--case") == 0)) {
      seed = std::strtoull(argv[i + 1], nullptr, 0);
      single = std::strcmp(argv[i], "--case") == 0;
    } else {
      std::fprintf(stderr, "usage: %s [--seconds N] [--seed S] | --case S\n", argv[0]);
      return 2;
    }
  }
  octavo::testing::Counts counts;
  const auto start = std::chrono::steady_clock::now();
  std::uint64_t next = seed;
  do {
    const std::string failure = octavo::testing::run_case(next, counts);
    if (!failure.empty()) {
      std::printf("FAILED %s\nfrom %s\nagain: octavo_fuzz_validate --case %llu\n", failure.c_str(),
                  octavo::testing::to_string(octavo::testing::random_case(next)).c_str(),
                  static_cast<unsigned long long>(next));
      return 1;
    }
    ++next;
  } while (!single && std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds);
  std::printf("%lld calls from seed %llu: %lld refused, %lld ran\n", static_cast<long long>(counts.calls),
              static_cast<unsigned long long>(seed), static_cast<long long>(counts.refused),
              static_cast<long long>(counts.ran));
  if (single || (counts.refused > 0 && counts.ran > 0)) return 0;
  std::printf("FAILED: a run must have seen calls of both kinds\n");
  return 1;
}
