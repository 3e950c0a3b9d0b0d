#include "work.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string_view>

namespace octavo::bench {
namespace {

class Parser {
 public:
  explicit Parser(const std::string& name) : name_(name) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw std::invalid_argument("work \"" + name_ + "\": " + what);
  }

  std::int64_t number(std::string_view text) const {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < 1) {
      fail("\"" + std::string(text) + "\" must be a whole number above 0");
    }
    return value;
  }

  // What stands before and after the first `mark`.
  std::pair<std::string_view, std::string_view> split(std::string_view text, std::string_view mark) const {
    const std::size_t at = text.find(mark);
    if (at == std::string_view::npos) fail("\"" + std::string(text) + "\" must have a \"" + std::string(mark) + "\"");
    return {text.substr(0, at), text.substr(at + mark.size())};
  }

 private:
  const std::string& name_;
};

void append_lengths(const Parser& parser, std::string_view text, std::vector<std::int64_t>& lengths) {
  const auto [context, count_text] = parser.split(text, "x");
  const std::int64_t count = parser.number(count_text);
  if (context.find("..") == std::string_view::npos) {
    lengths.insert(lengths.end(), static_cast<std::size_t>(count), parser.number(context));
    return;
  }
  const auto [low_text, high_text] = parser.split(context, "..");
  const auto low = static_cast<double>(parser.number(low_text)), high = static_cast<double>(parser.number(high_text));
  if (count < 2) parser.fail("a range of lengths needs two sequences or more");
  for (std::int64_t i = 0; i < count; ++i) {
    const double at = static_cast<double>(i) / static_cast<double>(count - 1);
    lengths.push_back(std::llround(low * std::pow(high / low, at)));
  }
}

}  // namespace

std::int64_t Work::longest() const {
  return *std::max_element(lengths.begin(), lengths.end());
}

std::int64_t Work::bytes() const {
  std::int64_t positions = 0;
  for (const std::int64_t length : lengths) {
    positions += window > 0 ? std::min(length, window + new_tokens - 1) : length;
  }
  return positions * kv_num_heads * 2 * row_bytes(cache, head_size);
}

Work parse_work(const std::string& name) {
  static const std::map<std::string, CacheType> kCaches = {{"fp16", CacheType::kFloat16},
                                                           {"bf16", CacheType::kBFloat16},
                                                           {"int8", CacheType::kInt8},
                                                           {"fp8", CacheType::kFloat8E4M3FN},
                                                           {"int4", CacheType::kInt4}};
  const Parser parser(name);
  Work work;
  work.name = name;
  std::istringstream words(name);
  std::string cache, geometry, shape, word, next;
  if (!(words >> cache >> geometry >> shape)) parser.fail("must be CACHE HEADS/KVxSIZE CONTEXTxBATCH[ VARIANT]");
  const auto found = kCaches.find(cache);
  if (found == kCaches.end()) parser.fail("the cache must be fp16, bf16, int8, fp8 or int4, got \"" + cache + "\"");
  work.cache = found->second;
  if (work.cache == CacheType::kBFloat16) work.type = ElementType::kBFloat16;

  const auto [heads, rest] = parser.split(geometry, "/");
  const auto [kv_heads, size] = parser.split(rest, "x");
  work.num_heads = parser.number(heads);
  work.kv_num_heads = parser.number(kv_heads);
  work.head_size = parser.number(size);

  std::string_view left = shape;
  while (!left.empty()) {
    const std::size_t plus = left.find('+');
    append_lengths(parser, left.substr(0, plus), work.lengths);
    left = plus == std::string_view::npos ? std::string_view() : left.substr(plus + 1);
  }

  while (words >> word) {
    if (word == "PER_CHANNEL") {
      work.per_channel = true;
      continue;
    }
    if (!(words >> next)) parser.fail("\"" + word + "\" must be a variant, or be followed by its number");
    if (word == "bf16" && next == "Q") {
      work.type = ElementType::kBFloat16;
    } else if (word == "page") {
      work.block_size = parser.number(next);
    } else if (word == "window") {
      work.window = parser.number(next);
    } else if (word == "softcap") {
      work.softcap = static_cast<float>(parser.number(next));
    } else if (next == "tokens") {
      work.new_tokens = parser.number(word);
    } else {
      parser.fail("no variant \"" + word + " " + next + "\"");
    }
  }
  if (work.per_channel && !work.quantized()) parser.fail("PER_CHANNEL needs a quantised cache");
  if (*std::min_element(work.lengths.begin(), work.lengths.end()) < work.new_tokens) {
    parser.fail("every sequence must be at least as long as its query tokens");
  }
  return work;
}

}  // namespace octavo::bench
