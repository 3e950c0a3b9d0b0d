// Runs the oracle over a fixed list of Cases, and writes the tensors of each call before and after it.
//
// Usage: octavo_export_cases FOLDER. FOLDER must exist; it gets
// - cases.bin: the elements of every tensor, row-major, one tensor after the other;
// - cases.json: for every Case its name, attributes, the implementations to compare with, and where its tensors are.
#include <fstream>
#include <iomanip>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "exported_cases.h"
#include "reference/reference.h"
#include "support/call.h"

namespace octavo::testing {
namespace {

using NamedViews = std::vector<std::pair<const char*, TensorView>>;

NamedViews inputs_of(const Arguments& a) {
  return {{"query", a.query},
          {"key", a.key},
          {"value", a.value},
          {"key_cache", a.key_cache},
          {"value_cache", a.value_cache},
          {"cumulative_sequence_length", a.cumulative_sequence_length},
          {"past_seqlens", a.past_seqlens},
          {"block_table", a.block_table},
          {"cos_cache", a.cos_cache},
          {"sin_cache", a.sin_cache},
          {"head_sink", a.head_sink},
          {"q_norm_weight", a.q_norm_weight},
          {"k_norm_weight", a.k_norm_weight},
          {"k_scale", a.k_scale},
          {"v_scale", a.v_scale},
          {"query_positions", a.query_positions},
          {"attention_bias", a.attention_bias}};
}

NamedViews results_of(const Arguments& a) {
  return {{"output", a.output},
          {"key_cache", a.key_cache},
          {"value_cache", a.value_cache},
          {"output_qk", a.output_qk},
          {"lse", a.lse}};
}

class Writer {
 public:
  explicit Writer(const std::string& folder)
      : data_(folder + "/cases.bin", std::ios::binary), manifest_(folder + "/cases.json") {
    manifest_ << std::showpoint << std::setprecision(9);  // a float is never taken for an integer
  }

  void write(const std::vector<ExportedCase>& cases) {
    manifest_ << "[";
    const char* separator = "\n";
    for (const ExportedCase& exported : cases) {
      manifest_ << std::exchange(separator, ",\n");
      write_case(exported);
    }
    manifest_ << "\n]\n";
  }

  // Whether everything reached the files.
  bool finish() {
    data_.close();
    manifest_.close();
    return data_.good() && manifest_.good();
  }

 private:
  void write_case(const ExportedCase& exported) {
    Call call(exported.spec);
    manifest_ << R"({"name": ")" << exported.spec.name << R"(", "head_size": )" << exported.spec.head_size
              << R"(, "against": [)" << (exported.group_query_attention ? R"("GroupQueryAttention")" : "")
              << (exported.group_query_attention && exported.onnx_operators ? ", " : "")
              << (exported.onnx_operators ? R"("ONNX")" : "") << "]";
    write_attributes(call.attributes);
    write_tensors("inputs", inputs_of(call.arguments));
    reference_run(call.arguments, call.attributes);
    write_tensors("results", results_of(call.arguments));
    manifest_ << "}";
  }

  void write_attributes(const Attributes& a) {
    manifest_ << ",\n  \"attributes\": {"
              << R"("num_heads": )" << a.num_heads << R"(, "kv_num_heads": )" << a.kv_num_heads << R"(, "scale": )"
              << a.scale << R"(, "softcap": )" << a.softcap << R"(, "local_window_size": )" << a.local_window_size
              << R"(, "is_causal": )" << a.is_causal << R"(, "do_rotary": )" << a.do_rotary
              << R"(, "rotary_interleaved": )" << a.rotary_interleaved << R"(, "qk_norm_epsilon": )"
              << a.qk_norm_epsilon << R"(, "k_quant_type": ")" << name(a.k_quant_type) << R"(", "v_quant_type": ")"
              << name(a.v_quant_type) << R"(", "k_cache_dtype": ")" << name(a.k_cache_dtype)
              << R"(", "v_cache_dtype": ")" << name(a.v_cache_dtype) << R"(", "qk_output": )" << a.qk_output << "}";
  }

  void write_tensors(const char* group, const NamedViews& tensors) {
    manifest_ << ",\n  \"" << group << "\": {";
    const char* separator = "";
    for (const auto& [tensor_name, view] : tensors) {
      if (!view.present()) continue;
      manifest_ << std::exchange(separator, ", ") << "\"" << tensor_name << R"(": {"type": ")" << name(view.type)
                << R"(", "shape": [)";
      for (int axis = 0; axis < view.rank; ++axis) {
        manifest_ << (axis == 0 ? "" : ", ") << view.shape[static_cast<std::size_t>(axis)];
      }
      manifest_ << R"(], "offset": )" << data_.tellp() << "}";
      data_.write(static_cast<const char*>(view.data), static_cast<std::streamsize>(view.element_count()) *
                                                           static_cast<std::streamsize>(size_in_bytes(view.type)));
    }
    manifest_ << "}";
  }

  std::ofstream data_;
  std::ofstream manifest_;
};

int export_cases(const std::string& folder) {
  Writer writer(folder);
  writer.write(exported_cases());
  if (writer.finish()) return 0;
  std::cerr << "cannot write cases.bin and cases.json in " << folder << "\n";
  return 1;
}

}  // namespace
}  // namespace octavo::testing

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: octavo_export_cases FOLDER\n";
    return 2;
  }
  return octavo::testing::export_cases(argv[1]);
}
