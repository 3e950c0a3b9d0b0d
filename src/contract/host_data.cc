#include "contract/host_data.h"

#include <cmath>
#include <cstdint>
#include <exception>
#include <iterator>
#include <optional>

#include "contract/duplicate_slots.h"
#include "contract/host_data_reader.h"
#include "contract/message.h"
#include "contract/tensors.h"

namespace octavo::contract {
namespace {

template <typename... Parts>
Status broken(const Parts&... parts) {
  return Status::invalid_argument(cat(parts...));
}

Status starts_at_zero(const HostData& data) {
  if (data.offset(0) == 0) return {};
  return broken("cumulative_sequence_length[0]: must be 0, got ", data.offset(0),
                "; it is where the first sequence's tokens start");
}

Status lengths_not_negative(const HostData& data) {
  for (std::int64_t sequence = 0; sequence < data.problem.batch_size; ++sequence) {
    if (data.new_tokens(sequence) >= 0) continue;
    return broken("cumulative_sequence_length[", sequence + 1, "]: must not be below the value before it, got ",
                  data.offset(sequence + 1), " after ", data.offset(sequence), "; an empty sequence repeats the value");
  }
  return {};
}

Status lengths_fit_query(const HostData& data) {
  if (data.live_tokens() <= data.problem.token_count) return {};
  return broken("cumulative_sequence_length[", data.problem.batch_size,
                "]: must be at most query's token_count = ", data.problem.token_count, ", got ", data.live_tokens(),
                "; query lacks tokens");
}

Status past_not_negative(const HostData& data) {
  for (std::int64_t sequence = 0; sequence < data.problem.batch_size; ++sequence) {
    if (data.past(sequence) >= 0) continue;
    return broken("past_seqlens[", sequence, "]: must not be negative, got ", data.past(sequence),
                  "; it counts the tokens already in the cache");
  }
  return {};
}

Status lengths_fit_table(const HostData& data) {
  const std::int64_t capacity = data.problem.context_capacity();
  for (std::int64_t sequence = 0; sequence < data.problem.batch_size; ++sequence) {
    if (data.kv_len(sequence) <= capacity) continue;
    return broken("past_seqlens[", sequence, "]: past plus new tokens must be at most ", capacity,
                  ", what a row of block_table can map, got ", data.past(sequence), " + ", data.new_tokens(sequence),
                  "; give block_table more columns");
  }
  return {};
}

Status positions_not_negative(const HostData& data) {
  if (!data.problem.has(Feature::kQueryPositions)) return {};
  for (std::int64_t token = 0; token < data.live_tokens(); ++token) {
    if (data.query_position(token) >= 0) continue;
    return broken("query_positions[", token, "]: must not be negative, got ", data.query_position(token),
                  "; only padding tokens past cumulative_sequence_length's last value may hold anything");
  }
  return {};
}

Status positions_have_rotation(const HostData& data) {
  const Problem& problem = data.problem;
  const std::int64_t limit = problem.rotary_max_positions;
  if (!problem.has(Feature::kRope)) return {};
  if (problem.has(Feature::kQueryPositions)) {
    for (std::int64_t token = 0; token < data.live_tokens(); ++token) {
      if (data.query_position(token) < limit) continue;
      return broken("query_positions[", token, "]: must be below the ", limit, " positions of cos_cache, got ",
                    data.query_position(token), "; pass a longer cos_cache and sin_cache");
    }
    return {};
  }
  for (std::int64_t sequence = 0; sequence < problem.batch_size; ++sequence) {
    if (data.new_tokens(sequence) == 0 || data.kv_len(sequence) <= limit) continue;
    return broken("past_seqlens[", sequence, "]: the last new position must be below the ", limit,
                  " positions of cos_cache, got ", data.kv_len(sequence) - 1,
                  "; pass a longer cos_cache and sin_cache");
  }
  return {};
}

// The first column of `columns` whose id is neither a block nor -1; columns.end if there is none.
std::int64_t first_wild_column(const HostData& data, std::int64_t sequence, Range columns) {
  for (std::int64_t column = columns.begin; column < columns.end; ++column) {
    const std::int64_t block = data.block_id(sequence, column);
    if (block < -1 || block >= data.problem.num_blocks) return column;
  }
  return columns.end;
}

Status wild_block(const HostData& data, std::int64_t sequence, std::int64_t column) {
  return broken("block_table[", sequence, ", ", column,
                "]: must be a block id below num_blocks = ", data.problem.num_blocks, " or -1 (unmapped), got ",
                data.block_id(sequence, column), "; give the column a block of the cache");
}

// Columns that the queries of one sequence see. Without query_positions the queries stand side by side, so the union of
// what they see has no gap; with them, what the query before has already covered is skipped.
Status visible_blocks_in_range(const HostData& data, std::int64_t sequence) {
  const std::int64_t kv_len = data.kv_len(sequence);
  if (!data.problem.has(Feature::kQueryPositions)) {
    const Range seen{data.visible(data.past(sequence), kv_len).begin, kv_len};
    const Range columns = data.columns(seen);
    const std::int64_t column = first_wild_column(data, sequence, columns);
    return column < columns.end ? wild_block(data, sequence, column) : Status{};
  }
  Range covered;
  for (std::int64_t token = data.offset(sequence); token < data.offset(sequence + 1); ++token) {
    const Range columns = data.columns(data.visible(data.query_position(token), kv_len));
    if (columns.empty()) continue;
    const bool overlaps = columns.begin < covered.end && covered.begin < columns.end;
    const Range before = {columns.begin, overlaps ? covered.begin : columns.end};
    const Range after = {overlaps ? covered.end : columns.end, columns.end};
    for (const Range& range : {before, after}) {
      const std::int64_t column = first_wild_column(data, sequence, range);
      if (column < range.end) return wild_block(data, sequence, column);
    }
    covered = overlaps ? Range{std::min(covered.begin, columns.begin), std::max(covered.end, columns.end)} : columns;
  }
  return {};
}

Status block_ids_in_range(const HostData& data) {
  for (std::int64_t sequence = 0; sequence < data.problem.batch_size; ++sequence) {
    if (data.new_tokens(sequence) == 0) continue;
    if (Status status = visible_blocks_in_range(data, sequence); !status.ok()) return status;
    if (data.problem.has(Feature::kSlotMapping)) continue;
    const Range written = data.columns({data.past(sequence), data.kv_len(sequence)});
    const std::int64_t column = first_wild_column(data, sequence, written);
    if (column < written.end) return wild_block(data, sequence, column);
  }
  return {};
}

Status slots_in_range(const HostData& data) {
  if (!data.problem.has(Feature::kSlotMapping)) return {};
  const std::int64_t slots = data.problem.num_blocks * data.problem.block_size;
  for (std::int64_t token = 0; token < data.live_tokens(); ++token) {
    if (data.slot(token) >= -1 && data.slot(token) < slots) continue;
    return broken("slot_mapping[", token, "]: must be below num_blocks * block_size = ", slots,
                  " or -1 (do not write), got ", data.slot(token), "; a slot is block * block_size + offset");
  }
  return {};
}

Status slots_distinct(const HostData& data) {
  const std::optional<DuplicateSlot> duplicate = find_duplicate_slot(data);
  if (!duplicate) return {};
  const bool explicit_slots = data.problem.has(Feature::kSlotMapping);
  return broken(explicit_slots ? "slot_mapping" : "block_table",
                ": two new tokens must not be written to one slot, got ", "tokens ", duplicate->first_token, " and ",
                duplicate->second_token, " in slot ", duplicate->slot, " (block ",
                duplicate->slot / data.problem.block_size, ", offset ", duplicate->slot % data.problem.block_size,
                explicit_slots ? "); give -1 to the one that is not to be kept"
                               : "); give sequences that append a last block of their own");
}

Status bias_covers_queries(const HostData& data) {
  if (!data.problem.has(Feature::kAttentionBias)) return {};
  for (std::int64_t sequence = 0; sequence < data.problem.batch_size; ++sequence) {
    if (data.new_tokens(sequence) <= data.problem.bias_query_capacity) continue;
    return broken("attention_bias: its query capacity of ", data.problem.bias_query_capacity,
                  " must cover every sequence, but sequence ", sequence, " has ", data.new_tokens(sequence),
                  " new tokens; make dimension 2 larger");
  }
  return {};
}

Status bias_covers_context(const HostData& data) {
  if (!data.problem.has(Feature::kAttentionBias)) return {};
  for (std::int64_t sequence = 0; sequence < data.problem.batch_size; ++sequence) {
    if (data.new_tokens(sequence) == 0 || data.kv_len(sequence) <= data.problem.bias_context_capacity) continue;
    return broken("attention_bias: its context capacity of ", data.problem.bias_context_capacity,
                  " must cover every sequence, but sequence ", sequence, " has ", data.kv_len(sequence),
                  " positions, past and new; make dimension 3 larger");
  }
  return {};
}

Status scores_fit(const HostData& data) {
  if (!data.problem.has(Feature::kOutputQk)) return {};
  for (std::int64_t sequence = 0; sequence < data.problem.batch_size; ++sequence) {
    if (data.new_tokens(sequence) == 0 || data.kv_len(sequence) <= data.problem.max_context_len) continue;
    return broken("output_qk: its last dimension of ", data.problem.max_context_len,
                  " must cover every sequence, but sequence ", sequence, " has ", data.kv_len(sequence),
                  " positions, past and new; raise attention_metadata's bound of the KV length");
  }
  return {};
}

Status scales_positive(const char* name, const TensorView& scales) {
  const auto* values = static_cast<const float*>(scales.data);
  for (std::int64_t i = 0; i < scales.element_count(); ++i) {
    if (std::isfinite(values[i]) && values[i] > 0) continue;
    return broken(name, ": scales must be finite and above 0, got ", values[i], " at element ", i,
                  "; a channel that is always 0 takes any scale, such as 1");
  }
  return {};
}

Status k_scales_positive(const HostData& data) {
  return scales_positive("k_scale", data.arguments.k_scale);
}
Status v_scales_positive(const HostData& data) {
  return scales_positive("v_scale", data.arguments.v_scale);
}

struct Bytes {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  bool overlaps(const Bytes& other) const noexcept { return begin < other.end && other.begin < end; }
};

// The memory of a tensor without gaps; empty for a strided one, whose gaps may belong to anybody.
Bytes memory_of(const TensorView& view) noexcept {
  if (view.element_count() == 0 || !is_contiguous(view)) return {};
  const auto begin = reinterpret_cast<std::uintptr_t>(view.data);
  return {begin, begin + static_cast<std::uintptr_t>(view.element_count()) * size_in_bytes(view.type)};
}

Status caches_apart(const HostData& data) {
  const MutableTensorView& keys = data.arguments.key_cache;
  const MutableTensorView& values = data.arguments.value_cache;
  if (keys.element_count() == 0 || !values.present()) return {};
  if (keys.data != values.data && !memory_of(keys).overlaps(memory_of(values))) return {};
  return broken(
      "value_cache: must not share memory with key_cache; got overlapping tensors; pass two tensors, or set "
      "kv_cache_layout to LATENT for MLA");
}

// Whether a row of output lies exactly where its row of query does: every row is read before it is written.
bool in_place(const HostData& data) noexcept {
  const Problem& problem = data.problem;
  return data.arguments.output.data == data.arguments.query.data && !problem.has(Feature::kPackedQkv) &&
         problem.v_head_size == problem.head_size;
}

Status outputs_apart(const HostData& data) {
  const Arguments& a = data.arguments;
  const struct {
    const char* name;
    Bytes memory;
  } tensors[] = {
      {"output", memory_of(a.output)},       {"output_qk", memory_of(a.output_qk)},     {"lse", memory_of(a.lse)},
      {"key_cache", memory_of(a.key_cache)}, {"value_cache", memory_of(a.value_cache)}, {"query", memory_of(a.query)}};
  constexpr std::size_t kOutputs = 3;
  for (std::size_t i = 0; i < kOutputs; ++i) {
    for (std::size_t j = i + 1; j < std::size(tensors); ++j) {
      if (!tensors[i].memory.overlaps(tensors[j].memory)) continue;
      if (i == 0 && j + 1 == std::size(tensors) && in_place(data)) continue;
      return broken(tensors[i].name, ": must not share memory with ", tensors[j].name,
                    "; got overlapping tensors; pass a tensor of its own");
    }
  }
  return {};
}

constexpr DataRule kRules[] = {
    {"D1", "cumulative_sequence_length starts with 0.", starts_at_zero},
    {"D2", "cumulative_sequence_length never falls.", lengths_not_negative},
    {"D3", "cumulative_sequence_length ends at most at token_count; the tokens from there on are padding.",
     lengths_fit_query},
    {"D4", "past_seqlens is not negative.", past_not_negative},
    {"D5", "Past plus new tokens of a sequence are at most max_blocks_per_sequence * block_size.", lengths_fit_table},
    {"D6", "query_positions is not negative.", positions_not_negative},
    {"D7", "With do_rotary = 1, every new token's position is below the rows of cos_cache.", positions_have_rotation},
    {"D8", "A block id that a query sees or a token is written to is -1 or below num_blocks.", block_ids_in_range},
    {"D9", "A slot is -1 or below num_blocks * block_size.", slots_in_range},
    {"D10", "No two new tokens are written to the same slot.", slots_distinct},
    {"D11", "attention_bias's query capacity covers the new tokens of every sequence.", bias_covers_queries},
    {"D12", "attention_bias's context capacity covers past plus new tokens of every sequence.", bias_covers_context},
    {"D13", "output_qk's last dimension covers past plus new tokens of every sequence.", scores_fit},
    {"D14", "k_scale is finite and above 0.", k_scales_positive},
    {"D15", "v_scale is finite and above 0.", v_scales_positive},
    {"D16", "key_cache and value_cache do not share memory.", caches_apart},
    {"D17",
     "output, output_qk and lse share memory neither with each other nor with a cache nor with query, except output "
     "with an unpacked query row for row.",
     outputs_apart},
};

}  // namespace

std::span<const DataRule> data_rules() noexcept {
  return kRules;
}

Status check_host_data(const Problem& problem, const Arguments& arguments) noexcept {
  try {
    const HostData data(problem, arguments);
    for (const DataRule& rule : kRules) {
      Status status = rule.check(data);
      if (status.ok()) continue;
      return {status.code(), cat(status.message(), " [", rule.id, "]")};
    }
    return {};
  } catch (const std::exception&) {  // a message that could not be allocated
    return out_of_memory();
  }
}

}  // namespace octavo::contract
