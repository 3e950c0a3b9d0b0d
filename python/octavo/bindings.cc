// octavo._core: the C++ API on DLPack and buffer-protocol arrays. octavo/attention.py is its only caller; it names the
// types that numpy cannot (bfloat16, float8) and allocates the outputs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "octavo/paged_attention.h"

namespace nb = nanobind;

namespace {

using octavo::Arguments;
using octavo::Attributes;
using octavo::ElementType;
using octavo::Status;
using octavo::StatusCode;

using ReadArray = nb::ndarray<nb::ro, nb::device::cpu>;
using WriteArray = nb::ndarray<nb::device::cpu>;

template <typename View>
struct Field {
  std::string_view name;
  View Arguments::*view;
};

constexpr auto kReadFields = std::to_array<Field<octavo::TensorView>>({
    {"query", &Arguments::query},
    {"key", &Arguments::key},
    {"value", &Arguments::value},
    {"cumulative_sequence_length", &Arguments::cumulative_sequence_length},
    {"past_seqlens", &Arguments::past_seqlens},
    {"block_table", &Arguments::block_table},
    {"cos_cache", &Arguments::cos_cache},
    {"sin_cache", &Arguments::sin_cache},
    {"slot_mapping", &Arguments::slot_mapping},
    {"head_sink", &Arguments::head_sink},
    {"q_norm_weight", &Arguments::q_norm_weight},
    {"k_norm_weight", &Arguments::k_norm_weight},
    {"k_scale", &Arguments::k_scale},
    {"v_scale", &Arguments::v_scale},
    {"attention_metadata", &Arguments::attention_metadata},
    {"query_positions", &Arguments::query_positions},
    {"attention_bias", &Arguments::attention_bias},
});

constexpr auto kWriteFields = std::to_array<Field<octavo::MutableTensorView>>({
    {"key_cache", &Arguments::key_cache},
    {"value_cache", &Arguments::value_cache},
    {"output", &Arguments::output},
    {"output_qk", &Arguments::output_qk},
    {"lse", &Arguments::lse},
});

template <typename Value>
struct AttributeField {
  std::string_view name;
  Value Attributes::*value;
};

constexpr auto kIntegerAttributes = std::to_array<AttributeField<std::int64_t>>({
    {"num_heads", &Attributes::num_heads},
    {"kv_num_heads", &Attributes::kv_num_heads},
    {"local_window_size", &Attributes::local_window_size},
    {"is_causal", &Attributes::is_causal},
    {"do_rotary", &Attributes::do_rotary},
    {"rotary_interleaved", &Attributes::rotary_interleaved},
    {"rotary_offset", &Attributes::rotary_offset},
    {"v_head_size", &Attributes::v_head_size},
    {"qk_output", &Attributes::qk_output},
});

constexpr auto kFloatAttributes = std::to_array<AttributeField<float>>({
    {"scale", &Attributes::scale},
    {"softcap", &Attributes::softcap},
    {"qk_norm_epsilon", &Attributes::qk_norm_epsilon},
});

[[noreturn]] void refuse(std::string_view name, const std::string& rule) {
  throw nb::value_error((std::string(name) + ": " + rule).c_str());
}

std::string class_name(nb::handle object) {
  return nb::cast<std::string>(nb::str(object.type()));
}

// The name of a DLPack type that octavo lacks: "float64", "bool".
std::string dlpack_name(const nb::dlpack::dtype& dtype) {
  static constexpr std::array<const char*, 7> kPrefixes{"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  const std::string bits = std::to_string(dtype.bits);
  if (dtype.lanes != 1) return "vectors of " + bits + "-bit elements";
  if (dtype.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bool)) return "bool";
  if (dtype.code < kPrefixes.size()) return kPrefixes[dtype.code] + bits;
  return bits + "-bit elements of DLPack type code " + std::to_string(dtype.code);
}

// What the contract's type rules allow `input` to be. They judge octavo's own types; this is for all others.
struct LegalTypes {
  const char* types;
  const char* rule;
};

LegalTypes legal_types(std::string_view input) {
  if (input == "query") return {"float32, float16 or bfloat16", "T1"};
  for (const auto* name : {"cumulative_sequence_length", "past_seqlens", "attention_metadata", "query_positions"}) {
    if (input == name) return {"int32", "T3"};
  }
  if (input == "block_table") return {"int32 or int64", "T4"};
  if (input == "slot_mapping") return {"block_table's, int32 or int64", "T5"};
  if (input == "k_scale" || input == "v_scale" || input == "lse") return {"float32", "T6"};
  if (input == "output_qk") return {"float32, float16 or bfloat16", "T7"};
  if (input == "key_cache" || input == "value_cache") return {"query's, int8, float8e4m3fn or uint8", "T8"};
  return {"query's, float32, float16 or bfloat16", "T2"};
}

ElementType element_type(std::string_view input, const nb::dlpack::dtype& dtype) {
  using Code = nb::dlpack::dtype_code;
  constexpr auto kFloat8E4M3FN = static_cast<Code>(10);  // dlpack.h 1.1; older releases of nanobind do not name it
  struct Row {
    Code code;
    int bits;
    ElementType type;
  };
  static constexpr std::array<Row, 8> kRows{{{Code::Float, 32, ElementType::kFloat32},
                                             {Code::Float, 16, ElementType::kFloat16},
                                             {Code::Bfloat, 16, ElementType::kBFloat16},
                                             {kFloat8E4M3FN, 8, ElementType::kFloat8E4M3FN},
                                             {Code::Int, 8, ElementType::kInt8},
                                             {Code::UInt, 8, ElementType::kUint8},
                                             {Code::Int, 32, ElementType::kInt32},
                                             {Code::Int, 64, ElementType::kInt64}}};
  for (const Row& row : kRows) {
    if (dtype.code == static_cast<std::uint8_t>(row.code) && dtype.bits == row.bits && dtype.lanes == 1) {
      return row.type;
    }
  }
  const LegalTypes legal = legal_types(input);
  refuse(input,
         std::string("type must be ") + legal.types + ", got " + dlpack_name(dtype) + "; cast it [" + legal.rule + "]");
}

// The type that attention.py named for an array that it had to view as plain integers, else the array's own.
ElementType element_type(std::string_view input, const nb::dlpack::dtype& dtype, const std::string& named) {
  if (named.empty()) return element_type(input, dtype);
  for (const ElementType type : {ElementType::kBFloat16, ElementType::kFloat8E4M3FN}) {
    if (named == octavo::name(type) && dtype.bits == 8 * octavo::size_in_bytes(type)) return type;
  }
  refuse(input, "cannot hold elements of type " + named + "; name bfloat16 or float8e4m3fn, of their width [V2]");
}

// A view of the array as it lies in memory: validate() knows which tensors may be strided.
template <typename View, typename Array>
View make_view(std::string_view input, const Array& array, const std::string& named_type) {
  View view;
  view.data = array.data();
  view.type = element_type(input, array.dtype(), named_type);
  view.rank = static_cast<int>(array.ndim());
  for (std::size_t axis = 0; axis < array.ndim() && axis < view.shape.size(); ++axis) {
    view.shape[axis] = static_cast<std::int64_t>(array.shape(axis));
  }
  view.set_contiguous_strides();
  if (array.size() == 0) return view;
  for (std::size_t axis = 0; axis < array.ndim() && axis < view.shape.size(); ++axis) {
    // The stride of an axis of extent 1 means nothing, and arrays hold anything there.
    if (view.shape[axis] != 1) view.strides[axis] = array.stride(axis);
  }
  return view;
}

// One call, with the arrays that its views point into.
struct Call {
  Arguments arguments;
  Attributes attributes;
  std::vector<ReadArray> inputs;
  std::vector<WriteArray> buffers;
};

// `kind`: "a readable", "a writable".
template <typename Array>
Array import_array(std::string_view input, nb::handle object, const char* kind, const char* advice) {
  Array array;
  if (!nb::try_cast(object, array, /*convert=*/false)) {
    refuse(input, std::string("must be ") + kind +
                      " array in CPU memory with DLPack or the buffer protocol (numpy, torch), got " +
                      class_name(object) + "; " + advice);
  }
  return array;
}

void set_tensor(Call& call, std::string_view input, nb::handle object, const std::string& named_type) {
  for (const auto& field : kReadFields) {
    if (field.name != input) continue;
    call.inputs.push_back(
        import_array<ReadArray>(input, object, "a readable", "convert it, for example with numpy.asarray"));
    call.arguments.*field.view = make_view<octavo::TensorView>(input, call.inputs.back(), named_type);
    return;
  }
  for (const auto& field : kWriteFields) {
    if (field.name != input) continue;
    call.buffers.push_back(
        import_array<WriteArray>(input, object, "a writable", "it is written in place, so pass one that may be"));
    call.arguments.*field.view = make_view<octavo::MutableTensorView>(input, call.buffers.back(), named_type);
    return;
  }
  refuse(input, "is not a tensor of PagedAttention");
}

// `wanted`: what an attribute of this type is, for the message.
template <typename Value>
Value attribute_value(std::string_view name, nb::handle value, const char* wanted) {
  Value converted{};
  if (!nb::try_cast(value, converted)) {
    const std::string got = nb::cast<std::string>(nb::repr(value)) + " of " + class_name(value);
    throw nb::type_error((std::string(name) + ": must be " + wanted + ", got " + got + "; convert it").c_str());
  }
  return converted;
}

// `rule`: the contract's id for the attribute.
template <typename Enum>
Enum parse(std::string_view attribute, const std::string& text, const char* rule, std::initializer_list<Enum> values) {
  std::string legal;
  for (const Enum value : values) {
    if (text == octavo::name(value)) return value;
    legal += (legal.empty() ? "\"" : ", \"") + std::string(octavo::name(value)) + "\"";
  }
  refuse(attribute, "must be one of " + legal + ", got \"" + text + "\"; use one of these spellings [" + rule + "]");
}

void set_attribute(Attributes& attributes, std::string_view name, nb::handle value) {
  using octavo::CacheType;
  using octavo::QuantType;
  for (const auto& field : kIntegerAttributes) {
    if (field.name != name) continue;
    attributes.*field.value = attribute_value<std::int64_t>(name, value, "an integer of at most 64 bits");
    return;
  }
  for (const auto& field : kFloatAttributes) {
    if (field.name != name) continue;
    attributes.*field.value = attribute_value<float>(name, value, "a number");
    return;
  }
  const std::string text = attribute_value<std::string>(name, value, "a string");
  const auto quant_types = {QuantType::kNone, QuantType::kPerTensor, QuantType::kPerChannel};
  const auto cache_types = {CacheType::kTensorType, CacheType::kFloat32,   CacheType::kFloat16,
                            CacheType::kBFloat16,   CacheType::kInt8,      CacheType::kFloat8E4M3FN,
                            CacheType::kInt4,       CacheType::kFloat4E2M1};
  if (name == "k_quant_type") return void(attributes.k_quant_type = parse<QuantType>(name, text, "A12", quant_types));
  if (name == "v_quant_type") return void(attributes.v_quant_type = parse<QuantType>(name, text, "A12", quant_types));
  if (name == "k_cache_dtype") return void(attributes.k_cache_dtype = parse<CacheType>(name, text, "A13", cache_types));
  if (name == "v_cache_dtype") return void(attributes.v_cache_dtype = parse<CacheType>(name, text, "A13", cache_types));
  if (name == "kv_cache_layout") {
    using octavo::CacheLayout;
    attributes.kv_cache_layout = parse<CacheLayout>(name, text, "A14", {CacheLayout::kSeparate, CacheLayout::kLatent});
    return;
  }
  refuse(name, "is not an attribute of PagedAttention");
}

// attributes: name -> int, float or str.
Attributes make_attributes(const nb::dict& attributes) {
  Attributes made;
  for (const auto& [name, value] : attributes) set_attribute(made, nb::cast<std::string>(name), value);
  return made;
}

// tensors: name -> (array, type name or "").
Call make_call(const nb::dict& tensors, const nb::dict& attributes) {
  Call call;
  for (const auto& [name, entry] : tensors) {
    const auto array_and_type = nb::cast<nb::tuple>(entry);
    set_tensor(call, nb::cast<std::string>(name), array_and_type[0], nb::cast<std::string>(array_and_type[1]));
  }
  call.attributes = make_attributes(attributes);
  return call;
}

// Owned by the module, which lives as long as the interpreter.
PyObject* unsupported_error = nullptr;
PyObject* resource_exhausted_error = nullptr;

// Options are arguments of their own in Python: "PlanOptions::backend" is `backend` there.
std::string python_message(const Status& status) {
  constexpr std::string_view kOptions = "PlanOptions::";
  std::string text(status.message());
  for (std::size_t at = text.find(kOptions); at != std::string::npos; at = text.find(kOptions, at)) {
    text.erase(at, kOptions.size());
  }
  return text;
}

void raise_if_failed(const Status& status) {
  const std::string message = python_message(status);
  switch (status.code()) {
    case StatusCode::kOk: return;
    case StatusCode::kInvalidArgument: throw nb::value_error(message.c_str());
    case StatusCode::kUnsupported: PyErr_SetString(unsupported_error, message.c_str()); break;
    case StatusCode::kResourceExhausted: PyErr_SetString(resource_exhausted_error, message.c_str()); break;
    case StatusCode::kInternal: PyErr_SetString(PyExc_RuntimeError, message.c_str()); break;
  }
  throw nb::python_error();
}

void validate_attributes(const nb::dict& attributes) {
  raise_if_failed(octavo::validate_attributes(make_attributes(attributes)));
}

// threads: 0 = the default executor.
void run(const nb::dict& tensors, const nb::dict& attributes, int threads, const std::string& backend,
         std::int64_t output_qk_limit_bytes) {
  const Call call = make_call(tensors, attributes);
  octavo::RunContext context;
  octavo::PlanOptions options;
  std::unique_ptr<octavo::Executor> team;
  if (threads > 0) {
    team = octavo::make_executor(threads);
    if (team == nullptr) throw std::bad_alloc();
  }
  context.executor = team != nullptr ? team.get() : &octavo::default_executor();
  options.concurrency = context.executor->concurrency();
  options.backend = backend;
  options.output_qk_limit_bytes = output_qk_limit_bytes;
  Status status;
  {
    nb::gil_scoped_release release;
    status = octavo::paged_attention(call.arguments, call.attributes, options, context);
  }
  raise_if_failed(status);
}

octavo::Problem validated_problem(const Call& call) {
  octavo::Problem problem;
  raise_if_failed(octavo::validate(call.arguments, call.attributes, problem));
  return problem;
}

nb::list explain(const nb::dict& tensors, const nb::dict& attributes) {
  nb::list rows;
  for (const octavo::Verdict& verdict : octavo::explain(validated_problem(make_call(tensors, attributes)))) {
    nb::dict row;
    row["backend"] = verdict.backend;
    row["description"] = verdict.description;
    row["refusal"] = verdict.refusal;
    rows.append(row);
  }
  return rows;
}

// The last dimension of output_qk, which depends on the other arguments only.
std::int64_t max_context_len(const nb::dict& tensors, const nb::dict& attributes) {
  Call call = make_call(tensors, attributes);
  call.attributes.qk_output = 0;
  call.arguments.output_qk = {};
  return validated_problem(call).max_context_len;
}

// Every feature that a call can ask for, in the order of octavo::Feature.
std::vector<std::string> feature_names() {
  std::vector<std::string> names;
  for (int bit = 0; bit < octavo::kFeatureCount; ++bit) {
    names.emplace_back(octavo::name(static_cast<octavo::Feature>(1u << bit)));
  }
  return names;
}

// The names of the features that the call asks for.
std::vector<std::string> requested_features(const nb::dict& tensors, const nb::dict& attributes) {
  const octavo::Problem problem = validated_problem(make_call(tensors, attributes));
  std::vector<std::string> names;
  for (int bit = 0; bit < octavo::kFeatureCount; ++bit) {
    const auto feature = static_cast<octavo::Feature>(1u << bit);
    if (problem.has(feature)) names.emplace_back(octavo::name(feature));
  }
  return names;
}

// A subclass of RuntimeError that reads as octavo.NAME in a traceback.
PyObject* new_exception(const char* qualified_name, const char* doc) {
  const nb::object octavo_error = nb::module_::import_("octavo.errors").attr("OctavoError");
  const nb::tuple bases = nb::make_tuple(octavo_error, nb::handle(PyExc_RuntimeError));
  PyObject* type = PyErr_NewExceptionWithDoc(qualified_name, doc, bases.ptr(), nullptr);
  if (type == nullptr) throw nb::python_error();
  return type;
}

}  // namespace

NB_MODULE(_core, module) {
  unsupported_error =
      new_exception("octavo.UnsupportedError", "The call is legal, but no backend of this build takes it.");
  resource_exhausted_error = new_exception("octavo.ResourceExhaustedError", "A size limit would be exceeded.");
  module.attr("UnsupportedError") = nb::handle(unsupported_error);
  module.attr("ResourceExhaustedError") = nb::handle(resource_exhausted_error);
  module.def("version", &octavo::version);
  module.def("validate_attributes", &validate_attributes, nb::arg("attributes"));
  module.def("run", &run, nb::arg("tensors"), nb::arg("attributes"), nb::arg("threads"), nb::arg("backend"),
             nb::arg("output_qk_limit_bytes"));
  module.def("explain", &explain, nb::arg("tensors"), nb::arg("attributes"));
  module.def("feature_names", &feature_names);
  module.def("requested_features", &requested_features, nb::arg("tensors"), nb::arg("attributes"));
  module.def("max_context_len", &max_context_len, nb::arg("tensors"), nb::arg("attributes"));
}
