#include "exported_cases.h"

#include <cstdint>
#include <string>
#include <utility>

namespace octavo::testing {
namespace {

class CaseList {
 public:
  template <typename Change>
  void both(const char* name, Change change) {
    add(name, change, true, true);
  }
  template <typename Change>
  void group_query_attention(const char* name, Change change) {
    add(name, change, true, false);
  }
  template <typename Change>
  void onnx_operators(const char* name, Change change) {
    add(name, change, false, true);
  }
  std::vector<ExportedCase> take() { return std::move(cases_); }

 private:
  // Every Case has a prefill, a decode step and a chunk, of lengths on and off block edges.
  template <typename Change>
  void add(const char* name, Change change, bool group_query_attention, bool onnx_operators) {
    Case c;
    c.name = name;
    c.seed = cases_.size() + 1;
    c.past = {0, 20, 13};
    c.added = {5, 1, 3};
    c.lse = true;
    change(c);
    c.output_qk_type = c.type;
    cases_.push_back({std::move(c), group_query_attention, onnx_operators});
  }

  std::vector<ExportedCase> cases_;
};

void set_heads(Case& c, std::int64_t num_heads, std::int64_t kv_num_heads) {
  c.num_heads = num_heads;
  c.kv_num_heads = kv_num_heads;
}

void set_masking_bias(Case& c) {
  c.bias = BiasShape::kFull;
  c.bias_masks = true;
}

void set_cache(Case& c, CacheType format, QuantType granularity) {
  c = with_cache(std::move(c), format, granularity, format, granularity);
}

void add_sizes(CaseList& list) {
  list.both("plain", [](Case&) {});
  list.both("packed", [](Case& c) { c.packed_qkv = true; });
  list.both("group_1", [](Case& c) { set_heads(c, 3, 3); });
  list.both("group_3", [](Case& c) { set_heads(c, 6, 2); });
  list.both("group_8", [](Case& c) { set_heads(c, 8, 1); });
  list.both("head_size_80", [](Case& c) { c.head_size = 80; });
  list.both("long", [](Case& c) {
    c.past = {300, 77, 512};
    c.added = {1, 33, 9};
    c.head_size = 64;
  });
  list.both("block_size_1", [](Case& c) { c.block_size = 1; });
}

void add_scores(CaseList& list) {
  list.both("scale", [](Case& c) { c.scale = 0.6f; });
  list.both("softcap", [](Case& c) { c.softcap = 1.5f; });
  list.both("softcap_saturated", [](Case& c) {
    c.softcap = 1.5f;
    c.query_magnitude = 5.0;
  });
  list.both("bias", [](Case& c) { c.bias = BiasShape::kFull; });
  list.both("bias_for_all_sequences", [](Case& c) { c.bias = BiasShape::kBroadcastBatch; });
  list.both("bias_for_all_heads", [](Case& c) { c.bias = BiasShape::kBroadcastHeads; });
  list.both("masking_bias", set_masking_bias);
  list.both("masking_bias_softcap", [](Case& c) {
    set_masking_bias(c);
    c.softcap = 1.5f;
  });
  list.both("window_1", [](Case& c) { c.window = 1; });
  list.both("window_4", [](Case& c) { c.window = 4; });
  list.both("window_17_masking_bias_softcap", [](Case& c) {
    set_masking_bias(c);
    c.window = 17;
    c.softcap = 2.0f;
  });
  list.both("scores", [](Case& c) { c.qk_output = 1; });
  list.both("scores_masking_bias_softcap", [](Case& c) {
    set_masking_bias(c);
    c.softcap = 1.5f;
    c.qk_output = 1;
  });
  list.both("probabilities", [](Case& c) { c.qk_output = 2; });
  list.both("probabilities_window", [](Case& c) {
    c.window = 5;
    c.qk_output = 2;
  });
  list.group_query_attention("sink", [](Case& c) { c.head_sink = true; });
  list.group_query_attention("sink_window_softcap", [](Case& c) {
    c.head_sink = true;
    c.window = 6;
    c.softcap = 2.0f;
  });
  list.group_query_attention("sink_probabilities", [](Case& c) {
    c.head_sink = true;
    c.qk_output = 2;
  });
  list.both("not_causal", [](Case& c) { c.causal = false; });
  list.both("not_causal_masking_bias", [](Case& c) {
    set_masking_bias(c);
    c.causal = false;
    c.qk_output = 1;
  });
}

void add_prologue(CaseList& list) {
  list.both("rope", [](Case& c) { c.rotary = Rotary::kHalf; });
  list.both("rope_interleaved", [](Case& c) { c.rotary = Rotary::kInterleaved; });
  list.both("rope_packed_window", [](Case& c) {
    c.rotary = Rotary::kHalf;
    c.packed_qkv = true;
    c.window = 6;
  });
  list.both("rope_of_half_the_head", [](Case& c) {
    c.rotary = Rotary::kHalf;
    c.head_size = 32;
    c.rotary_dim = 16;
  });
  list.onnx_operators("rope_interleaved_tree", [](Case& c) {
    c.rotary = Rotary::kInterleaved;
    c.positions = Positions::kTree;
  });
  list.onnx_operators("qk_norm", [](Case& c) { c.qk_norm = true; });
  list.onnx_operators("qk_norm_rope", [](Case& c) {
    c.qk_norm = true;
    c.rotary = Rotary::kHalf;
  });
}

void add_types(CaseList& list) {
  list.both("float16", [](Case& c) { c.type = ElementType::kFloat16; });
  // GroupQueryAttention rounds a rotated Q to float16, which the contract does not.
  list.onnx_operators("float16_rope", [](Case& c) {
    c.type = ElementType::kFloat16;
    c.rotary = Rotary::kHalf;
  });
  list.both("float16_masking_bias_softcap", [](Case& c) {
    c.type = ElementType::kFloat16;
    set_masking_bias(c);
    c.softcap = 1.5f;
  });
  list.group_query_attention("float16_sink_window", [](Case& c) {
    c.type = ElementType::kFloat16;
    c.head_sink = true;
    c.window = 4;
  });
  list.onnx_operators("bfloat16_probabilities", [](Case& c) {
    c.type = ElementType::kBFloat16;
    c.qk_output = 2;
  });
  list.onnx_operators("bfloat16_rope", [](Case& c) {
    c.type = ElementType::kBFloat16;
    c.rotary = Rotary::kInterleaved;
  });
  list.onnx_operators("float16_cache", [](Case& c) { set_cache(c, CacheType::kFloat16, QuantType::kNone); });
  list.both("int8_cache", [](Case& c) { set_cache(c, CacheType::kInt8, QuantType::kPerTensor); });
  list.both("int8_cache_per_channel", [](Case& c) { set_cache(c, CacheType::kInt8, QuantType::kPerChannel); });
  list.both("int8_cache_rope", [](Case& c) {
    set_cache(c, CacheType::kInt8, QuantType::kPerChannel);
    c.rotary = Rotary::kHalf;
  });
  list.group_query_attention("int8_cache_sink", [](Case& c) {
    set_cache(c, CacheType::kInt8, QuantType::kPerTensor);
    c.head_sink = true;
  });
  list.onnx_operators("float8_cache", [](Case& c) { set_cache(c, CacheType::kFloat8E4M3FN, QuantType::kPerTensor); });
  list.onnx_operators("int4_cache", [](Case& c) { set_cache(c, CacheType::kInt4, QuantType::kPerChannel); });
  list.onnx_operators("float4_cache", [](Case& c) { set_cache(c, CacheType::kFloat4E2M1, QuantType::kPerChannel); });
}

}  // namespace

std::vector<ExportedCase> exported_cases() {
  CaseList list;
  add_sizes(list);
  add_scores(list);
  add_prologue(list);
  add_types(list);
  return list.take();
}

}  // namespace octavo::testing
