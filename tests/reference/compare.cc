#include "reference/compare.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>

#include "support/codecs.h"

namespace octavo::testing {
namespace {

constexpr double kRoundoff = 0x1.0p-24;

// The codes of one cache row against the numbers that belong there.
void compare_row(Report& report, const char* cache, CacheType format, const std::byte* row, const double* values,
                 const double* errors, const TensorView& scale, std::int64_t slot, std::int64_t head,
                 std::int64_t width) {
  for (std::int64_t c = 0; c < width; ++c) {
    const double factor = scale_of(scale, head, c);
    const double value = values[c] / factor;
    if (std::isnan(value)) continue;  // a format without NaN stores what it likes
    double error = (errors == nullptr ? 0.0 : errors[c]) / factor;
    if (scale.present()) error += 2.0 * kRoundoff * std::fabs(value);  // of the division
    const double low = decode(format, encode(format, value - error));
    const double high = decode(format, encode(format, value + error));
    const double got = load(format, row, c);
    if (got >= low && got <= high) continue;
    std::ostringstream out;
    out.precision(9);
    out << cache << " slot " << slot << " head " << head << " channel " << c << ": stored " << got << ", expected "
        << decode(format, encode(format, value)) << " (from " << value << " +- " << error << ")";
    report.failures.push_back(out.str());
    return;
  }
}

void compare_caches(Report& report, Call& call, const Call::Snapshot& before, const Prologue& prologue) {
  const Arguments& a = call.arguments;
  const CacheType k_format = k_cache_format(a, call.attributes);
  const std::int64_t heads = call.attributes.kv_num_heads;
  const auto tokens = static_cast<std::int64_t>(prologue.slot.size());
  const std::int64_t width = tokens == 0 ? 0 : static_cast<std::int64_t>(prologue.key.size()) / tokens / heads;
  Call::Snapshot untouched = before;
  const auto accept = [&](const MutableTensorView& cache, std::int64_t slot, std::int64_t head) {
    // A row may lie in the buffer of either cache (K and V interleaved).
    const std::byte* row = cache_row(cache, slot, head);
    const auto bytes = static_cast<std::size_t>(cache.shape[3]) * size_in_bytes(cache.type);
    for (const char* name : {"key_cache", "value_cache"}) {
      if (!call.has_buffer(name)) continue;
      const std::byte* start = call.buffer(name).data();
      if (row < start || row >= start + call.buffer(name).size()) continue;
      std::memcpy(untouched.find(name)->second.data() + (row - start), row, bytes);
    }
    return row;
  };
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t slot = prologue.slot[static_cast<std::size_t>(t)];
    if (slot < 0) continue;
    for (std::int64_t g = 0; g < heads; ++g) {
      const auto i = static_cast<std::size_t>((t * heads + g) * width);
      const std::byte* key_row = accept(a.key_cache, slot, g);
      compare_row(report, "key_cache", k_format, key_row, prologue.key.data() + i, prologue.key_error.data() + i,
                  a.k_scale, slot, g, width);
      if (prologue.value.empty()) continue;
      const std::byte* value_row = accept(a.value_cache, slot, g);
      compare_row(report, "value_cache", v_cache_format(a, call.attributes), value_row, prologue.value.data() + i,
                  nullptr, a.v_scale, slot, g, width);
    }
  }
  for (const char* name : {"output", "output_qk", "lse"}) untouched.erase(name);
  const std::string changed = call.changes_since(untouched);
  if (!changed.empty()) report.failures.push_back("bytes that must not change did: " + changed);
  const std::string guards = call.broken_guards();
  if (!guards.empty()) report.failures.push_back("written outside of: " + guards);
}

void compare_tensor(Report& report, const char* name, const MutableTensorView& tensor,
                    const std::vector<double>& expected, const std::vector<double>& errors) {
  const CacheType format = format_of(tensor.type);
  double worst_excess = 0.0;
  std::string worst;
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < tensor.element_count(); ++i) {
    const double want = expected[static_cast<std::size_t>(i)];
    const double error = errors[static_cast<std::size_t>(i)];
    const double got = load(format, tensor.data, i);
    if (std::isnan(want) || got == want) continue;
    // Exact zeros and infinities have an error of 0: nothing else will do. All else is rounded to the tensor's type.
    double rounding = 0.0;
    if (error > 0.0) {
      rounding = unit_roundoff(format) * (std::fabs(want) + error) + smallest_positive(format) / 2.0;
      if (std::isfinite(got)) {
        report.worst = std::max(report.worst, std::max(0.0, std::fabs(got - want) - rounding) / error);
      }
    }
    const double excess = std::fabs(got - want) / (error + rounding);
    if (excess <= 1.0) continue;
    ++count;
    if (!worst.empty() && !(excess > worst_excess)) continue;
    worst_excess = excess;
    std::ostringstream out;
    out.precision(9);
    out << name << "[" << i << "] (of " << tensor.shape[0] << "x" << tensor.shape[1] << (tensor.rank > 2 ? "x..." : "")
        << "): got " << got << ", expected " << want << " +- " << error + rounding;
    worst = out.str();
  }
  if (!worst.empty()) report.failures.push_back(worst + "; " + std::to_string(count) + " such elements");
}

}  // namespace

std::string Report::text() const {
  std::string text;
  for (std::size_t i = 0; i < std::min<std::size_t>(failures.size(), 6); ++i) text += failures[i] + "\n";
  if (failures.size() > 6) text += "... and " + std::to_string(failures.size() - 6) + " more\n";
  return text;
}

Arithmetic vnni_arithmetic(const Call& call) {
  const auto in_integers = [](CacheType type) { return type == CacheType::kInt8 || type == CacheType::kInt4; };
  Arithmetic arithmetic;
  // Half a step: the largest number of the row has 8,355,584 of them, and a weight of 1 has 2^24 - 1.
  if (in_integers(k_cache_format(call.arguments, call.attributes))) arithmetic.query_floor = 0.5 / 8355584.0;
  if (in_integers(v_cache_format(call.arguments, call.attributes))) arithmetic.weight_floor = 0.5 / 16777215.0;
  return arithmetic;
}

Report compare(Call& call, const Call::Snapshot& before) {
  return compare(call, before, vnni_arithmetic(call));
}

Report compare(Call& call, const Call::Snapshot& before, const Arithmetic& arithmetic) {
  Report report;
  const Prologue prologue = reference_prologue(call.arguments, call.attributes);
  compare_caches(report, call, before, prologue);
  const Expected expected =
      reference_attention(prologue, call.arguments, call.attributes, Deviation::kNone, arithmetic);
  compare_tensor(report, "output", call.arguments.output, expected.output, expected.output_error);
  compare_tensor(report, "output_qk", call.arguments.output_qk, expected.output_qk, expected.output_qk_error);
  if (call.arguments.lse.present()) {
    compare_tensor(report, "lse", call.arguments.lse, expected.lse, expected.lse_error);
  }
  return report;
}

std::string first_difference(Call& a, Call& b, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    if (!a.has_buffer(name)) continue;
    const std::vector<std::byte> left = a.buffer(name).copy();
    const std::vector<std::byte> right = b.buffer(name).copy();
    if (left.size() != right.size()) return name + " has another size";
    const auto at = std::mismatch(left.begin(), left.end(), right.begin()).first;
    if (at != left.end()) return name + " differs from byte " + std::to_string(at - left.begin());
  }
  return {};
}

}  // namespace octavo::testing
