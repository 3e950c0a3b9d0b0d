// Which KV positions a query may see: the causal and window masks, for the checks and for every host-side schedule.
#pragma once

#include <algorithm>
#include <cstdint>

#include "octavo/problem.h"

namespace octavo::contract {

// A half-open range of tokens, positions or table columns.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  constexpr bool empty() const noexcept { return begin >= end; }
};

// KV positions of a sequence of length `kv_len` that a query at `position` sees. Unmapped blocks are masked elsewhere.
constexpr Range visible_range(const Problem& problem, std::int64_t position, std::int64_t kv_len) noexcept {
  if (!problem.is_causal) return {0, kv_len};
  const std::int64_t window = problem.local_window_size;
  return {window > 0 ? std::max<std::int64_t>(position - window + 1, 0) : 0, std::min(position + 1, kv_len)};
}

}  // namespace octavo::contract
