// Text of error messages: numbers, names and shapes joined into one sentence.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

#include "octavo/status.h"
#include "octavo/tensor_view.h"

namespace octavo::contract {

// A shape as "(4, 16)". A rank above kMaxRank shows the extents that a view can hold, then "...".
std::string shape_text(const TensorView& view);

void append(std::string& text, std::string_view part);
void append(std::string& text, double part);
void append(std::string& text, std::int64_t part);
template <std::integral Integer>
void append(std::string& text, Integer part) {
  append(text, static_cast<std::int64_t>(part));
}

// cat("softcap: got ", -1.0f) == "softcap: got -1"
template <typename... Parts>
std::string cat(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  return text;
}

// What a noexcept function returns when not even its message could be allocated (short enough to need no allocation).
inline Status out_of_memory() noexcept {
  return {StatusCode::kInternal, "out of memory"};
}

}  // namespace octavo::contract
