#include "support/case_list.h"

#include <algorithm>
#include <string>
#include <utility>

#include "support/codecs.h"

namespace octavo::testing {
namespace {

using Format = std::pair<CacheType, QuantType>;

// A prefill, a decode step, an idle sequence and a chunk in one batch, off every power of two.
Case mixed_batch() {
  Case c;
  c.past = {0, 19, 33, 7};
  c.added = {7, 1, 0, 4};
  return c;
}

std::vector<Format> cache_formats(ElementType type) {
  std::vector<Format> formats = {{CacheType::kTensorType, QuantType::kNone}};
  if (type == ElementType::kFloat32) {
    formats.push_back({CacheType::kFloat16, QuantType::kNone});
    formats.push_back({CacheType::kBFloat16, QuantType::kNone});
  }
  for (const CacheType format :
       {CacheType::kInt8, CacheType::kFloat8E4M3FN, CacheType::kInt4, CacheType::kFloat4E2M1}) {
    formats.push_back({format, QuantType::kPerTensor});
    formats.push_back({format, QuantType::kPerChannel});
  }
  return formats;
}

std::string format_name(const Format& format) {
  if (format.first == CacheType::kTensorType) return "T";
  const std::string suffix = format.second == QuantType::kPerChannel ? "_channel" : "";
  return name(format.first) + suffix;
}

void latent(Case& c) {
  c.latent = true;
  c.kv_num_heads = 1;
  c.head_size = 24;
  c.v_head_size = 16;
  c.scale = 0.3f;
}

void ring(Case& c) {
  c.table = TableStyle::kRing;
  c.window = 6;
  c.block_size = 4;
}

template <CacheType kFormat, QuantType kGranularity>
void quantized(Case& c) {
  c = with_cache(c, kFormat, kGranularity, kFormat, kGranularity);
}

}  // namespace

const std::vector<FeatureChoice>& feature_choices() {
  static const std::vector<FeatureChoice> choices = {
      {"packed_qkv", "inputs", [](Case& c) { c.packed_qkv = true; }},
      {"latent", "inputs", latent},
      {"slots_derived", "slots", [](Case& c) { c.slots = SlotStyle::kDerived; }},
      {"slots_unset", "slots", [](Case& c) { c.slots = SlotStyle::kSomeUnset; }},
      {"slots_elsewhere", "slots", [](Case& c) { c.slots = SlotStyle::kElsewhere; }},
      {"rope_half", "rope", [](Case& c) { c.rotary = Rotary::kHalf; }},
      {"rope_interleaved", "rope", [](Case& c) { c.rotary = Rotary::kInterleaved; }},
      {"rope_offset", "rope",
       [](Case& c) {
         c.rotary = Rotary::kHalf;
         c.rotary_offset = 8;
         c.rotary_dim = 8;
       }},
      {"rope_partial_interleaved", "rope",
       [](Case& c) {
         c.rotary = Rotary::kInterleaved;
         c.rotary_dim = 8;
       }},
      {"qk_norm", "norm", [](Case& c) { c.qk_norm = true; }},
      {"head_sink", "sink", [](Case& c) { c.head_sink = true; }},
      {"softcap", "softcap",
       [](Case& c) {
         c.softcap = 1.5f;
         c.query_magnitude = 2.0;
       }},
      {"scale", "scale", [](Case& c) { c.scale = 0.6f; }},
      {"window", "mask", [](Case& c) { c.window = 6; }},
      {"window_stale_table", "mask",
       [](Case& c) {
         c.window = 3;
         c.block_size = 4;
         c.below_window = BelowWindow::kStale;
       }},
      {"window_of_one", "mask", [](Case& c) { c.window = 1; }},
      {"not_causal", "mask", [](Case& c) { c.causal = false; }},
      {"ring_table", "mask", ring},
      {"bias", "bias", [](Case& c) { c.bias = BiasShape::kFull; }},
      {"bias_masking", "bias",
       [](Case& c) {
         c.bias = BiasShape::kBroadcastHeads;
         c.bias_masks = true;
       }},
      {"bias_over_batch", "bias", [](Case& c) { c.bias = BiasShape::kBroadcastBatch; }},
      {"bias_over_both", "bias", [](Case& c) { c.bias = BiasShape::kBroadcastBoth; }},
      {"positions_sequential", "positions", [](Case& c) { c.positions = Positions::kSequential; }},
      {"positions_tree", "positions", [](Case& c) { c.positions = Positions::kTree; }},
      {"output_scores", "output_qk", [](Case& c) { c.qk_output = 1; }},
      {"output_probabilities", "output_qk", [](Case& c) { c.qk_output = 2; }},
      {"output_scores_float16", "output_qk",
       [](Case& c) {
         c.qk_output = 1;
         c.output_qk_type = ElementType::kFloat16;
       }},
      {"output_probabilities_bfloat16", "output_qk",
       [](Case& c) {
         c.qk_output = 2;
         c.output_qk_type = ElementType::kBFloat16;
       }},
      {"lse", "lse", [](Case& c) { c.lse = true; }},
      {"head_major", "order", [](Case& c) { c.cache_order = CacheOrder::kHeadMajor; }},
      {"kv_interleaved", "order", [](Case& c) { c.cache_order = CacheOrder::kKvInterleaved; }},
      {"int64_indices", "indices", [](Case& c) { c.index_type = ElementType::kInt64; }},
      {"block_of_four", "blocks", [](Case& c) { c.block_size = 4; }},
      {"block_of_three", "blocks", [](Case& c) { c.block_size = 3; }},
      {"contiguous_table", "table", [](Case& c) { c.table = TableStyle::kContiguous; }},
      {"shared_prefix", "table",
       [](Case& c) {
         c.table = TableStyle::kSharedPrefix;
         c.past = {37, 20, 16, 48};
       }},
      {"unmapped_holes", "holes",
       [](Case& c) {
         c.block_size = 4;
         c.unmapped_holes = 2;
       }},
      {"metadata_tight", "metadata", [](Case& c) { c.metadata = Metadata::kTight; }},
      {"metadata_loose", "metadata", [](Case& c) { c.metadata = Metadata::kLoose; }},
      {"metadata_unknown", "metadata", [](Case& c) { c.metadata = Metadata::kUnknown; }},
      {"padding", "padding", [](Case& c) { c.padding_tokens = 3; }},
      {"float16", "type", [](Case& c) { c.type = ElementType::kFloat16; }},
      {"bfloat16", "type", [](Case& c) { c.type = ElementType::kBFloat16; }},
      {"int8_cache", "cache", quantized<CacheType::kInt8, QuantType::kPerTensor>},
      {"fp8_channel_cache", "cache", quantized<CacheType::kFloat8E4M3FN, QuantType::kPerChannel>},
      {"int4_channel_cache", "cache", quantized<CacheType::kInt4, QuantType::kPerChannel>},
      {"e2m1_cache", "cache", quantized<CacheType::kFloat4E2M1, QuantType::kPerTensor>},
  };
  return choices;
}

bool is_legal(const Case& c) {
  const bool window = c.window > 0;
  if (window && !c.causal) return false;
  if (c.table == TableStyle::kRing && (!window || c.positions == Positions::kTree)) return false;
  if (c.latent) {
    if (c.packed_qkv || c.head_sink || c.qk_norm || c.v_quant != QuantType::kNone) return false;
    if (c.v_head_size != 0 && c.v_head_size != c.head_size && c.scale == 0.0f) return false;
  }
  if (c.rotary != Rotary::kNone && c.rotary_offset + c.rotary_width() > c.head_size) return false;
  return true;
}

std::vector<Case> single_feature_cases() {
  std::vector<Case> cases = {mixed_batch()};
  cases.back().name = "plain";
  for (const FeatureChoice& choice : feature_choices()) {
    Case c = mixed_batch();
    choice.apply(c);
    c.name = choice.name;
    cases.push_back(std::move(c));
  }
  return cases;
}

std::vector<Case> feature_pair_cases() {
  std::vector<Case> cases;
  const std::vector<FeatureChoice>& choices = feature_choices();
  for (std::size_t i = 0; i < choices.size(); ++i) {
    for (std::size_t j = i + 1; j < choices.size(); ++j) {
      if (std::string(choices[i].aspect) == choices[j].aspect) continue;
      Case c = mixed_batch();
      c.seed = 1000 + i * choices.size() + j;
      choices[i].apply(c);
      choices[j].apply(c);
      if (c.latent) c.v_quant = QuantType::kNone;
      c.name = std::string(choices[i].name) + "+" + choices[j].name;
      if (is_legal(c)) cases.push_back(std::move(c));
    }
  }
  return cases;
}

std::vector<Case> type_cases() {
  std::vector<Case> cases;
  for (const ElementType type : {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16}) {
    for (const Format& k : cache_formats(type)) {
      for (const Format& v : cache_formats(type)) {
        Case c = mixed_batch();
        c.type = type;
        c.head_sink = true;
        c = with_cache(c, k.first, k.second, v.first, v.second);
        c.name = std::string(octavo::name(type)) + "_k_" + format_name(k) + "_v_" + format_name(v);
        cases.push_back(c);
        if (k != v) continue;
        // The same caches with arithmetic before the store, and as the row of LATENT.
        c.rotary = Rotary::kHalf;
        c.qk_norm = true;
        c.name += "_prologue";
        cases.push_back(c);
        Case row = mixed_batch();
        row.type = type;
        latent(row);
        row = with_cache(row, k.first, k.second, CacheType::kTensorType, QuantType::kNone);
        row.name = std::string(octavo::name(type)) + "_latent_" + format_name(k);
        cases.push_back(row);
      }
    }
  }
  return cases;
}

std::vector<Case> size_cases() {
  std::vector<Case> cases;
  const auto add = [&cases](Case c, const std::string& name) {
    c.name = name;
    cases.push_back(std::move(c));
  };
  for (const std::int64_t head_size : {8, 24, 40, 48, 64, 80, 96, 112, 128, 192, 256, 512}) {
    for (const ElementType type : {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16}) {
      Case c = mixed_batch();
      c.head_size = head_size;
      c.type = type;
      c.rotary = Rotary::kHalf;
      const std::string name = "head_size_" + std::to_string(head_size) + "_" + octavo::name(type);
      add(c, name);
      add(with_cache(c, CacheType::kInt4, QuantType::kPerChannel, CacheType::kInt8, QuantType::kPerChannel),
          name + "_k_int4_v_int8");
    }
  }
  for (const auto& [head_size, v_head_size] : {std::pair{576, 512}, {1024, 1024}, {1024, 8}, {192, 128}, {8, 8}}) {
    Case c = mixed_batch();
    latent(c);
    c.head_size = head_size;
    c.v_head_size = v_head_size;
    c.scale = 0.07f;
    c.rotary = Rotary::kInterleaved;
    c.rotary_offset = head_size > 64 ? head_size - 64 : 0;
    const std::string name = "latent_" + std::to_string(head_size) + "_" + std::to_string(v_head_size);
    add(c, name);
    c.type = ElementType::kFloat16;
    add(with_cache(c, CacheType::kFloat8E4M3FN, QuantType::kPerTensor, CacheType::kTensorType, QuantType::kNone),
        name + "_fp8");
  }
  {
    Case c = mixed_batch();
    latent(c);
    c.kv_num_heads = 2;
    add(c, "latent_two_kv_heads");
    c.v_head_size = 0;
    c.scale = 0.0f;
    add(c, "latent_whole_row_is_value");
  }
  for (std::int64_t group = 1; group <= 20; ++group) {
    Case c = mixed_batch();
    c.kv_num_heads = group % 3 + 1;
    c.num_heads = group * c.kv_num_heads;
    c.head_sink = true;
    c.head_size = 32;
    add(c, "group_" + std::to_string(group));
    c = with_cache(c, CacheType::kInt8, QuantType::kPerChannel, CacheType::kInt8, QuantType::kPerTensor);
    add(c, "group_" + std::to_string(group) + "_int8");
  }
  for (const std::int64_t block_size : {1, 2, 3, 4, 5, 8, 16, 32, 64, 128, 512}) {
    Case c;
    c.past = {0, 65, 511, 40, 0};
    c.added = {35, 1, 2, 9, 0};
    c.block_size = block_size;
    c.num_heads = 2;
    c.kv_num_heads = 1;
    add(c, "block_size_" + std::to_string(block_size));
    c.window = 33;
    c.head_sink = true;
    add(c, "block_size_" + std::to_string(block_size) + "_window");
    c.table = TableStyle::kRing;
    add(c, "block_size_" + std::to_string(block_size) + "_ring");
  }
  return cases;
}

std::vector<Case> length_cases() {
  std::vector<Case> cases;
  const auto add = [&cases](const std::string& name, std::vector<std::int64_t> past, std::vector<std::int64_t> added) {
    Case c;
    c.name = name;
    c.num_heads = 2;
    c.kv_num_heads = 1;
    c.past = std::move(past);
    c.added = std::move(added);
    c.lse = true;
    cases.push_back(c);
    return c;
  };
  add("batch_of_none", {}, {});
  add("one_empty_sequence", {0}, {0});
  add("all_idle", {5, 40, 0}, {0, 0, 0});
  add("ragged_with_empty", {0, 3, 0, 100, 16, 15}, {1, 0, 16, 3, 17, 0});
  add("one_token_ever", {0}, {1});
  for (const std::int64_t length : {1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257}) {
    add("prefill_" + std::to_string(length), {0}, {length});
    add("chunk_after_" + std::to_string(length), {length}, {3});
  }
  for (const std::int64_t length : {0, 1, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049}) {
    add("decode_after_" + std::to_string(length), {length, 2, length}, {1, 1, 1});
  }
  Case c = add("long_context", {6001, 3}, {2, 1});
  c.name = "long_context_quantized";
  c.head_sink = true;
  cases.push_back(
      with_cache(c, CacheType::kInt8, QuantType::kPerChannel, CacheType::kFloat8E4M3FN, QuantType::kPerTensor));
  c.name = "long_context_window";
  c.window = 1000;
  cases.push_back(c);
  c.name = "long_context_ring";
  c.table = TableStyle::kRing;
  cases.push_back(c);
  c = add("padding_only", {}, {});
  c.padding_tokens = 5;
  c.name = "padding_without_sequences";
  cases.push_back(c);
  c = add("captured_batch", {20, 0, 0}, {1, 0, 0});
  c.padding_tokens = 2;
  c.slots = SlotStyle::kDerived;
  c.positions = Positions::kSequential;
  c.name = "captured_batch_with_padding";
  cases.push_back(c);
  c = add("no_columns_base", {0, 0}, {0, 0});
  c.table_columns = -1;
  c.name = "table_without_columns";
  cases.push_back(c);
  std::vector<std::int64_t> past, added;
  for (std::int64_t b = 0; b < 300; ++b) {
    past.push_back(b * 7 % 90);
    added.push_back(b % 11 == 0 ? 5 : b % 13 == 0 ? 0 : 1);
  }
  add("batch_of_300", past, added);
  return cases;
}

}  // namespace octavo::testing
