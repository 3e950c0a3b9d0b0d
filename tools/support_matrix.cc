// Prints the sections of docs/support_matrix.md for the devices that this build has backends for.
//
// Every cell is a real call (a Case) that validation accepts and that asks for the row's feature. It is judged without
// a device: what depends on one (driver, compute capability, shared memory) is not on the page.
// tools/gen_support_matrix.py puts the page together.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dispatch/choose.h"
#include "support/call.h"
#include "support/case.h"

namespace octavo {
namespace {

using testing::Case;

constexpr ElementType kElementTypes[] = {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16};

struct Row {
  std::string title;
  Case call;  // of any element type
  std::optional<Feature> feature = std::nullopt;
  bool own_lengths = false;      // ask with the lengths in `call`
  bool some_types_only = false;  // the operator may lack the row for some types of query
};

struct Table {
  std::string title;
  std::string first_column;
  std::vector<Row> rows;
};

[[noreturn]] void fail(const std::string& message) {
  std::fprintf(stderr, "support_matrix: %s\n", message.c_str());
  std::exit(1);
}

Case plain() {
  Case c;
  c.head_size = 64;
  return c;
}

template <typename Change>
Case changed(Change change) {
  Case c = plain();
  change(c);
  return c;
}

Case with_caches(const Case& c, CacheType type, QuantType quant) {
  return testing::with_cache(c, type, quant, type, quant);
}

void make_latent(Case& c, std::int64_t head_size, std::int64_t v_head_size) {
  c.latent = true;
  c.kv_num_heads = 1;
  c.head_size = head_size;
  c.v_head_size = v_head_size;
  c.scale = 0.125f;
}

void ask_for_most(Case& c) {
  c.packed_qkv = true;
  c.slots = testing::SlotStyle::kDerived;
  c.rotary = testing::Rotary::kInterleaved;
  c.rotary_offset = 8;
  c.rotary_dim = 32;
  c.qk_norm = c.head_sink = c.lse = true;
  c.softcap = 30.0f;
  c.window = 8;
  c.bias = testing::BiasShape::kFull;
  c.positions = testing::Positions::kSequential;
  c.qk_output = 2;
  c = with_caches(c, CacheType::kInt4, QuantType::kPerChannel);
}

Table features() {
  using enum Feature;
  Table table{"features", "feature", {}};
  const auto add = [&table](Feature feature, const char* title, const Case& call) {
    table.rows.push_back({title, call, feature});
  };
  const auto set = [&add](Feature feature, const char* title, auto change) { add(feature, title, changed(change)); };
  set(kPackedQkv, "packed QKV in `query`", [](Case& c) { c.packed_qkv = true; });
  set(kSlotMapping, "`slot_mapping`, -1 = do not write", [](Case& c) { c.slots = testing::SlotStyle::kSomeUnset; });
  set(kRope, "RoPE, halves rotated", [](Case& c) { c.rotary = testing::Rotary::kHalf; });
  set(kRope, "RoPE, interleaved pairs, `rotary_offset`, partial", [](Case& c) {
    c.rotary = testing::Rotary::kInterleaved;
    c.rotary_offset = 8;
    c.rotary_dim = 32;
  });
  set(kQkNorm, "QK-norm (RMS, per head)", [](Case& c) { c.qk_norm = true; });
  set(kHeadSink, "`head_sink`", [](Case& c) { c.head_sink = true; });
  set(kSoftcap, "`softcap`", [](Case& c) { c.softcap = 30.0f; });
  set(kLocalWindow, "`local_window_size`", [](Case& c) { c.window = 8; });
  set(kNonCausal, "`is_causal` = 0", [](Case& c) { c.causal = false; });
  set(kAttentionBias, "`attention_bias`", [](Case& c) { c.bias = testing::BiasShape::kFull; });
  set(kQueryPositions, "`query_positions` (tree and speculative masks)",
      [](Case& c) { c.positions = testing::Positions::kTree; });
  set(kOutputQk, "`output_qk`, scores", [](Case& c) { c.qk_output = 1; });
  set(kOutputQk, "`output_qk`, probabilities", [](Case& c) { c.qk_output = 2; });
  set(kLse, "log-sum-exp output (C++ and Python)", [](Case& c) { c.lse = true; });
  set(kLatent, "`kv_cache_layout` = LATENT (MLA), `v_head_size`", [](Case& c) { make_latent(c, 64, 48); });
  add(kQuantizedCache, "quantized caches, PER_TENSOR scales",
      with_caches(plain(), CacheType::kInt8, QuantType::kPerTensor));
  add(kPerChannelScale, "quantized caches, PER_CHANNEL scales",
      with_caches(plain(), CacheType::kInt8, QuantType::kPerChannel));
  add(kFourBitCache, "4-bit caches, two elements a byte",
      with_caches(plain(), CacheType::kInt4, QuantType::kPerTensor));
  set(kStridedCache, "strided caches: head-major", [](Case& c) { c.cache_order = testing::CacheOrder::kHeadMajor; });
  set(kStridedCache, "strided caches: K and V in one tensor",
      [](Case& c) { c.cache_order = testing::CacheOrder::kKvInterleaved; });
  set(kInt64Indices, "int64 `block_table` and `slot_mapping` (C++ and Python)",
      [](Case& c) { c.index_type = ElementType::kInt64; });
  set(kSmallBlocks, "block sizes below 16 or no power of two", [](Case& c) { c.block_size = 3; });
  set(kPackedQkv, "most of these in one call, over an int4 cache", ask_for_most);
  for (int bit = 0; bit < kFeatureCount; ++bit) {
    const auto feature = static_cast<Feature>(1u << bit);
    const bool has_row =
        std::any_of(table.rows.begin(), table.rows.end(), [feature](const Row& row) { return row.feature == feature; });
    if (!has_row) fail(std::string("the feature ") + name(feature) + " has no row; add one to features()");
  }
  return table;
}

Table cache_types() {
  Table table{"cache types", "`key_cache` and `value_cache`", {}};
  for (const CacheType type : {CacheType::kFloat32, CacheType::kFloat16, CacheType::kBFloat16}) {
    Row row{name(type), with_caches(plain(), type, QuantType::kNone)};
    row.some_types_only = true;
    table.rows.push_back(std::move(row));
  }
  for (const CacheType type : {CacheType::kInt8, CacheType::kFloat8E4M3FN, CacheType::kInt4, CacheType::kFloat4E2M1}) {
    for (const QuantType quant : {QuantType::kPerTensor, QuantType::kPerChannel}) {
      table.rows.push_back({std::string(name(type)) + ", " + name(quant), with_caches(plain(), type, quant)});
    }
  }
  table.rows.push_back({"int8 PER_CHANNEL, values int4 PER_TENSOR",
                        testing::with_cache(plain(), CacheType::kInt8, QuantType::kPerChannel, CacheType::kInt4,
                                            QuantType::kPerTensor)});
  return table;
}

Table head_sizes() {
  Table table{"head sizes", "`head_size`", {}};
  const auto add = [&table](const std::string& title, const Case& call) {
    table.rows.push_back({title, call});
    table.rows.push_back({title + ", int4 caches", with_caches(call, CacheType::kInt4, QuantType::kPerChannel)});
  };
  for (const std::int64_t head_size : {8, 40, 64, 80, 96, 112, 128, 192, 256, 512}) {
    add(std::to_string(head_size), changed([=](Case& c) { c.head_size = head_size; }));
  }
  for (const auto& [head_size, v_head_size] : {std::pair{576, 512}, {1024, 1024}}) {
    add("LATENT " + std::to_string(head_size) + ", `v_head_size` " + std::to_string(v_head_size),
        changed([&](Case& c) { make_latent(c, head_size, v_head_size); }));
  }
  return table;
}

Table block_sizes() {
  Table table{"block sizes", "`block_size`", {}};
  for (const std::int64_t block_size : {1, 3, 8, 16, 32, 64, 128, 256, 512}) {
    table.rows.push_back({std::to_string(block_size), changed([=](Case& c) { c.block_size = block_size; })});
  }
  return table;
}

Table groups() {
  Table table{"query heads that share a KV head", "`num_heads` / `kv_num_heads`", {}};
  for (const std::int64_t group : {1, 2, 4, 5, 7, 8, 12, 16, 20, 64, 128}) {
    table.rows.push_back({std::to_string(group), changed([=](Case& c) { c.num_heads = group * c.kv_num_heads; })});
  }
  return table;
}

void set_lengths(Case& c, std::vector<std::int64_t> past, std::vector<std::int64_t> added) {
  c.past = std::move(past);
  c.added = std::move(added);
}

Table new_tokens() {
  Table table{"new tokens", "new tokens a sequence, bounded by `attention_metadata`", {}};
  const auto add = [&table](const std::string& title, std::vector<std::int64_t> past, std::vector<std::int64_t> added) {
    Row row{title, plain()};
    set_lengths(row.call, std::move(past), std::move(added));
    row.call.metadata = testing::Metadata::kTight;
    row.own_lengths = true;
    table.rows.push_back(std::move(row));
  };
  for (const std::int64_t tokens : {1, 2, 4, 8, 9, 16, 64, 512}) {
    add(std::to_string(tokens), {100, 37}, {tokens, tokens});
  }
  add("1 and 64 in one batch", {100, 0}, {1, 64});
  add("none", {100, 37}, {0, 0});
  return table;
}

// Why `backend` does not take `problem`, whatever the device; empty if it does.
std::string refusal_without_device(const dispatch::Backend& backend, const Problem& problem) {
  dispatch::Backend host_part = backend;
  host_part.refuse_device = nullptr;
  return dispatch::refusal(host_part, problem);
}

enum class Lengths { kStep, kPrompt };

Case with_lengths(Case c, Lengths lengths) {
  if (lengths == Lengths::kStep) set_lengths(c, {100, 37}, {1, 1});
  if (lengths == Lengths::kPrompt) set_lengths(c, {0, 5}, {64, 40});
  return c;
}

// The Problem of a row for this type of query; nullopt where the operator does not have it.
std::optional<Problem> problem_of(const Row& row, ElementType type, Lengths lengths) {
  Case spec = row.own_lengths ? row.call : with_lengths(row.call, lengths);
  spec.type = type;
  const testing::Call call(spec);
  Problem problem;
  if (const Status status = validate(call.arguments, call.attributes, problem); !status.ok()) {
    if (row.some_types_only) return std::nullopt;
    fail(row.title + ": the row's call is not legal: " + status.message());
  }
  if (row.feature && !problem.has(*row.feature)) {
    fail(row.title + ": the row's call does not ask for " + name(*row.feature) + ", only for " +
         to_string(problem.features));
  }
  return problem;
}

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
  return text;
}

// A column: one backend, or several that count as one, since which of them accepts depends on the processor.
struct Column {
  std::string title;
  std::vector<const dispatch::Backend*> backends;
  Lengths lengths = Lengths::kStep;
  std::vector<ElementType> types = {};  // of query, that it takes in a plain call

  bool has(ElementType type) const { return std::find(types.begin(), types.end(), type) != types.end(); }

  // Empty if one of them takes `problem`, else what each says.
  std::string refusal(const Problem& problem) const {
    std::vector<std::string> refusals;
    for (const dispatch::Backend* backend : backends) {
      std::string reason = refusal_without_device(*backend, problem);
      if (reason.empty()) return {};
      refusals.push_back(std::string(backend->name) + ": " + reason);
    }
    return joined(refusals);
  }
};

// A backend for decode steps is asked for steps, one for prompts for prompts; and each for the types that it is for,
// which its title names.
void specialise(Column& column) {
  for (const Lengths lengths : {Lengths::kStep, Lengths::kPrompt}) {
    column.lengths = lengths;
    std::vector<std::string> names;
    for (const ElementType type : kElementTypes) {
      if (!column.refusal(*problem_of({"plain", plain()}, type, lengths)).empty()) continue;
      column.types.push_back(type);
      names.emplace_back(name(type));
    }
    if (column.types.empty()) continue;
    if (names.size() < std::size(kElementTypes)) column.title += " (" + joined(names) + ")";
    return;
  }
  fail(column.title + " takes neither a plain decode step nor a plain prompt");
}

std::vector<Column> columns_of(DeviceKind device) {
  std::vector<Column> columns;
  for (const dispatch::Backend* backend : dispatch::backends()) {
    if (backend->device != device) continue;
    if (device == DeviceKind::kCpu && !columns.empty()) {
      columns[0].backends.push_back(backend);
    } else {
      columns.push_back({device == DeviceKind::kCpu ? "CPU" : backend->name, {backend}});
    }
  }
  for (Column& column : columns) specialise(column);
  return columns;
}

class Section {
 public:
  explicit Section(std::vector<Column> columns) : columns_(std::move(columns)) {}

  void print(const char* device, const std::vector<Table>& tables) {
    std::printf("## %s\n", device);
    for (const Table& table : tables) print_table(device, table);
    if (!notes_.empty()) std::printf("\n### %s: reasons\n\n", device);
    for (std::size_t i = 0; i < notes_.size(); ++i) std::printf("%zu. %s\n", i + 1, notes_[i].c_str());
  }

 private:
  void print_table(const char* device, const Table& table) {
    const bool types =
        std::any_of(table.rows.begin(), table.rows.end(), [](const Row& r) { return r.some_types_only; });
    std::printf("\n### %s: %s\n\n| %s |%s", device, table.title.c_str(), table.first_column.c_str(),
                types ? " types of `query` |" : "");
    for (const Column& column : columns_) std::printf(" %s |", column.title.c_str());
    std::printf("\n|---|%s", types ? "---|" : "");
    for (std::size_t i = 0; i < columns_.size(); ++i) std::printf("---|");
    std::printf("\n");
    for (const Row& row : table.rows) {
      std::printf("| %s |", row.title.c_str());
      if (types) std::printf(" %s |", joined(legal_types(row)).c_str());
      for (const Column& column : columns_) std::printf(" %s |", cell(row, column).c_str());
      std::printf("\n");
    }
  }

  static std::vector<std::string> legal_types(const Row& row) {
    std::vector<std::string> types;
    for (const ElementType type : kElementTypes) {
      if (problem_of(row, type, Lengths::kStep)) types.emplace_back(name(type));
    }
    if (types.empty()) fail(row.title + ": no type of query has this row");
    return types;
  }

  std::string cell(const Row& row, const Column& column) {
    std::vector<std::string> accepted;
    std::vector<std::string> marks;
    bool beyond_title = false;
    for (const ElementType type : kElementTypes) {
      const std::optional<Problem> problem = problem_of(row, type, column.lengths);
      if (!problem) continue;
      const std::string refusal = column.refusal(*problem);
      if (refusal.empty()) {
        accepted.emplace_back(name(type));
        beyond_title = beyond_title || !column.has(type);
      } else if (!column.has(type)) {
        continue;  // as the title says
      } else if (std::string mark = note(refusal); std::find(marks.begin(), marks.end(), mark) == marks.end()) {
        marks.push_back(std::move(mark));
      }
    }
    if (accepted.empty()) return marks.empty() ? "no" : "no [" + joined(marks) + "]";
    if (marks.empty()) return beyond_title ? joined(accepted) : "yes";
    return joined(accepted) + " [" + joined(marks) + "]";
  }

  std::string note(const std::string& refusal) {
    auto found = std::find(notes_.begin(), notes_.end(), refusal);
    if (found == notes_.end()) found = notes_.insert(notes_.end(), refusal);
    return std::to_string(found - notes_.begin() + 1);
  }

  std::vector<Column> columns_;
  std::vector<std::string> notes_;
};

}  // namespace
}  // namespace octavo

int main() {
  using namespace octavo;
  const std::vector<Table> tables = {features(), cache_types(), head_sizes(), block_sizes(), groups(), new_tokens()};
  const char* separator = "";
  for (const auto& [device, title] : {std::pair{DeviceKind::kCpu, "CPU"}, {DeviceKind::kCuda, "CUDA"}}) {
    std::vector<Column> columns = columns_of(device);
    if (columns.empty()) continue;
    std::printf("%s", separator);
    Section(std::move(columns)).print(title, tables);
    separator = "\n";
  }
}
