// The values that the D rules are about, read from host memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "contract/visible.h"
#include "octavo/paged_attention.h"

namespace octavo::contract {

class HostData {
 public:
  HostData(const Problem& p, const Arguments& a) noexcept
      : problem(p),
        arguments(a),
        offsets_(static_cast<const std::int32_t*>(a.cumulative_sequence_length.data)),
        past_(static_cast<const std::int32_t*>(a.past_seqlens.data)),
        positions_(static_cast<const std::int32_t*>(a.query_positions.data)) {}

  const Problem& problem;
  const Arguments& arguments;

  std::int64_t offset(std::int64_t index) const noexcept { return offsets_[index]; }
  std::int64_t past(std::int64_t sequence) const noexcept { return past_[sequence]; }
  std::int64_t query_position(std::int64_t token) const noexcept { return positions_[token]; }
  std::int64_t block_id(std::int64_t sequence, std::int64_t column) const noexcept {
    return index(arguments.block_table, sequence * problem.max_blocks_per_sequence + column);
  }
  std::int64_t slot(std::int64_t token) const noexcept { return index(arguments.slot_mapping, token); }

  std::int64_t live_tokens() const noexcept { return offset(problem.batch_size); }  // the rest is padding
  std::int64_t new_tokens(std::int64_t sequence) const noexcept { return offset(sequence + 1) - offset(sequence); }
  std::int64_t kv_len(std::int64_t sequence) const noexcept { return past(sequence) + new_tokens(sequence); }

  // Columns that hold the positions of `range`.
  Range columns(Range range) const noexcept {
    if (range.empty()) return {};
    return {range.begin / problem.block_size, (range.end - 1) / problem.block_size + 1};
  }

  Range visible(std::int64_t position, std::int64_t kv_len) const noexcept {
    return visible_range(problem, position, kv_len);
  }

 private:
  std::int64_t index(const TensorView& view, std::int64_t i) const noexcept {
    return problem.index_type == ElementType::kInt64 ? static_cast<const std::int64_t*>(view.data)[i]
                                                     : static_cast<const std::int32_t*>(view.data)[i];
  }

  const std::int32_t* offsets_;
  const std::int32_t* past_;
  const std::int32_t* positions_;
};

}  // namespace octavo::contract
