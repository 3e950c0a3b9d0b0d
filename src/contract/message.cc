#include "contract/message.h"

#include <array>
#include <charconv>

namespace octavo::contract {

void append(std::string& text, std::string_view part) {
  text.append(part);
}

void append(std::string& text, std::int64_t part) {
  text += std::to_string(part);
}

void append(std::string& text, double part) {
  // to_chars and not printf: the decimal point must not depend on the program's locale.
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), part, std::chars_format::general, 6).ptr;
  text.append(digits.data(), end);
}

std::string shape_text(const TensorView& view) {
  std::string text = "(";
  for (int axis = 0; axis < view.rank && axis < kMaxRank; ++axis) {
    if (axis > 0) text += ", ";
    append(text, view.shape[static_cast<std::size_t>(axis)]);
  }
  if (view.rank > kMaxRank) text += ", ...";
  return text + ")";
}

}  // namespace octavo::contract
