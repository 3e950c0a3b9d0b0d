#include "decode.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <sstream>

#include "kernels.h"
#include "octavo/paged_attention.h"

namespace octavo::bench {
namespace {

constexpr std::int64_t kRingBytes = std::int64_t{420} << 20;  // of distinct caches; the L2 of an H200 has 60 MB
constexpr std::size_t kMinCalls = 16;

// Kernels that are not attention: lengths and append. Whatever else a call launches counts as attention.
constexpr std::string_view kAppendKernels[] = {"8schedule", "8prologue"};

// Relative errors of a kernel that rounds Q, P and the output to 16 bits: 2.2e-4 to 5.5e-4 in float16, 1.7e-3 to 2.4e-3
// in bfloat16. A dropped key, scale or window lies far above.
double error_bound(ElementType type) {
  return type == ElementType::kBFloat16 ? 4e-3 : 8e-4;
}
constexpr double kWorstRow = 4.0;  // times the bound

ElementType storage(CacheType cache) {
  switch (cache) {
    case CacheType::kFloat16: return ElementType::kFloat16;
    case CacheType::kBFloat16: return ElementType::kBFloat16;
    case CacheType::kInt8: return ElementType::kInt8;
    case CacheType::kFloat8E4M3FN: return ElementType::kFloat8E4M3FN;
    default: return ElementType::kUint8;
  }
}

double to_double(std::uint16_t bits, ElementType type) {
  __half_raw half;
  half.x = bits;
  __nv_bfloat16_raw brain;
  brain.x = bits;
  return static_cast<double>(type == ElementType::kBFloat16 ? __bfloat162float(__nv_bfloat16(brain))
                                                            : __half2float(__half(half)));
}

// Everything a row needs on the device: one pool of K and one of V that every cache of the ring has its pages in, in
// random order, and for each call of the graph its own output.
class Row {
 public:
  Row(const Work& work, const std::string& backend, const Stream& stream) : work_(work), stream_(stream) {
    make_caches();
    make_tokens();
    make_scales();
    make_plan(backend);
  }

  Result measure() {
    Result result;
    for (std::size_t i = 0; i < outputs_.size(); ++i) call(i);  // appends the new tokens to every cache
    stream_.synchronize("first run");
    const Graph whole = Graph::capture(stream_, [this] {
      for (std::size_t i = 0; i < outputs_.size(); ++i) call(i);
    });
    const Graph attention = whole.without(kAppendKernels);
    result.call_kernels = whole.kernels() / outputs_.size();
    result.attention_kernels = attention.kernels() / outputs_.size();
    if (result.attention_kernels == 0) throw std::runtime_error("no kernel of the call is attention");

    for (const std::size_t i : {std::size_t{0}, tables_.size() - 1}) {
      const std::vector<double> expected = expect(i);
      for (const Graph* graph : {&whole, &attention}) {
        for (const Buffer& output : outputs_) output.fill(0xff, stream_);  // NaN
        graph->launch(stream_);
        stream_.synchronize("replay");
        compare(expected, outputs_[i].read<std::uint16_t>(), result);
      }
    }
    const std::vector<Times> times = time_replays(stream_, {&attention, &whole});
    const auto calls = static_cast<double>(outputs_.size());
    const auto of_one = [calls](const Times& t) { return Times{t.median / calls, t.least / calls, t.most / calls}; };
    result.attention = of_one(times[0]);
    result.call = of_one(times[1]);
    result.backend = plan_.backend_name();
    result.bytes = work_.bytes();
    result.caches = tables_.size();
    result.calls = outputs_.size();
    return result;
  }

 private:
  Buffer random(std::int64_t elements, CacheType type) {
    const std::int64_t bytes = row_bytes(type, elements);
    Buffer buffer(static_cast<std::size_t>((bytes + 15) / 16 * 16));
    check(launch_fill(buffer.data(), buffer.bytes(), type, ++seed_, stream_), "fill");
    return buffer;
  }

  CacheType type_of_tokens() const {
    return work_.type == ElementType::kBFloat16 ? CacheType::kBFloat16 : CacheType::kFloat16;
  }

  void make_caches() {
    const auto pages_of = [this](std::int64_t length) { return (length + work_.block_size - 1) / work_.block_size; };
    columns_ = pages_of(work_.longest());
    std::int64_t pages = 0;
    for (const std::int64_t length : work_.lengths) pages += pages_of(length);
    const std::int64_t page = work_.block_size * work_.kv_num_heads;
    // A window reads little of a large cache: what it reads decides how many caches L2 cannot hold.
    const auto caches = std::clamp<std::int64_t>((kRingBytes + work_.bytes() - 1) / work_.bytes(), 2, 32);
    blocks_ = caches * pages;
    k_ = random(blocks_ * page * work_.head_size, work_.cache);
    v_ = random(blocks_ * page * work_.head_size, work_.cache);

    std::vector<std::int32_t> order(static_cast<std::size_t>(blocks_));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(11));
    auto next = order.begin();
    for (std::int64_t i = 0; i < caches; ++i) {
      std::vector<std::int32_t> table(static_cast<std::size_t>(work_.batch() * columns_), -1);
      for (std::int64_t b = 0; b < work_.batch(); ++b) {
        const std::int64_t used = pages_of(work_.lengths[static_cast<std::size_t>(b)]);
        std::copy_n(next, used, table.begin() + b * columns_);
        next += used;
      }
      tables_.emplace_back(table);
    }
  }

  void make_tokens() {
    const std::int64_t tokens = work_.batch() * work_.new_tokens;
    query_ = random(tokens * work_.num_heads * work_.head_size, type_of_tokens());
    key_ = random(tokens * work_.kv_num_heads * work_.head_size, type_of_tokens());
    value_ = random(tokens * work_.kv_num_heads * work_.head_size, type_of_tokens());
    std::vector<std::int32_t> cumulative(1, 0), past, lengths;
    for (const std::int64_t length : work_.lengths) {
      cumulative.push_back(cumulative.back() + static_cast<std::int32_t>(work_.new_tokens));
      past.push_back(static_cast<std::int32_t>(length - work_.new_tokens));
      lengths.push_back(static_cast<std::int32_t>(length));
    }
    cumulative_ = Buffer(cumulative);
    past_ = Buffer(past);
    lengths_ = Buffer(lengths);
    metadata_ = {static_cast<std::int32_t>(work_.new_tokens), static_cast<std::int32_t>(work_.longest())};
    const std::size_t calls = (kMinCalls + tables_.size() - 1) / tables_.size() * tables_.size();
    for (std::size_t i = 0; i < calls; ++i) {
      outputs_.emplace_back(static_cast<std::size_t>(tokens * work_.num_heads * work_.head_size) *
                            sizeof(std::uint16_t));
    }
  }

  // Scales that bring the codes back to a deviation of about 1, other than 1 so that a lost one shows.
  void make_scales() {
    if (!work_.quantized()) return;
    const float typical = work_.cache == CacheType::kInt8 ? 0.025f : work_.cache == CacheType::kInt4 ? 0.22f : 0.9f;
    std::mt19937 generator(13);
    std::uniform_real_distribution<float> spread(0.75f, 1.25f);
    for (Buffer* buffer : {&k_scale_, &v_scale_}) {
      std::vector<float> values(static_cast<std::size_t>(work_.per_channel ? work_.kv_num_heads * work_.head_size : 1));
      for (float& value : values) value = typical * spread(generator);
      *buffer = Buffer(values);
    }
  }

  void make_plan(const std::string& backend) {
    const std::int64_t tokens = work_.batch() * work_.new_tokens;
    const std::int64_t q_row = work_.num_heads * work_.head_size, kv_row = work_.kv_num_heads * work_.head_size;
    const std::int64_t stored =
        work_.cache == CacheType::kInt4 ? row_bytes(work_.cache, work_.head_size) : work_.head_size;
    Attributes attributes{.num_heads = work_.num_heads, .kv_num_heads = work_.kv_num_heads};
    attributes.softcap = work_.softcap;
    attributes.local_window_size = work_.window;
    Arguments& a = arguments_;
    a.query = TensorView(query_.data(), work_.type, {tokens, q_row});
    a.key = TensorView(key_.data(), work_.type, {tokens, kv_row});
    a.value = TensorView(value_.data(), work_.type, {tokens, kv_row});
    for (auto [view, pool] : {std::pair{&a.key_cache, &k_}, std::pair{&a.value_cache, &v_}}) {
      *view = MutableTensorView(pool->data(), storage(work_.cache),
                                {blocks_, work_.block_size, work_.kv_num_heads, stored});
    }
    a.cumulative_sequence_length = TensorView(cumulative_.data(), ElementType::kInt32, {work_.batch() + 1});
    a.past_seqlens = TensorView(past_.data(), ElementType::kInt32, {work_.batch()});
    a.block_table = TensorView(tables_[0].data(), ElementType::kInt32, {work_.batch(), columns_});
    a.attention_metadata = TensorView(metadata_.data(), ElementType::kInt32, {2});
    a.output = MutableTensorView(outputs_[0].data(), work_.type, {tokens, q_row});
    if (work_.quantized()) {
      attributes.k_quant_type = attributes.v_quant_type =
          work_.per_channel ? QuantType::kPerChannel : QuantType::kPerTensor;
      if (work_.cache == CacheType::kInt4) attributes.k_cache_dtype = attributes.v_cache_dtype = CacheType::kInt4;
      for (auto [view, scale] : {std::pair{&a.k_scale, &k_scale_}, std::pair{&a.v_scale, &v_scale_}}) {
        *view = work_.per_channel
                    ? TensorView(scale->data(), ElementType::kFloat32, {work_.kv_num_heads, 1, work_.head_size})
                    : TensorView(scale->data(), ElementType::kFloat32, {1});
      }
    }
    Problem problem;
    check(validate(a, attributes, problem));
    PlanOptions options;
    options.device = DeviceKind::kCuda;
    options.backend = backend;
    check(plan(problem, options, plan_));
    workspace_ = Buffer(plan_.workspace_bytes());
    workspace_.fill(0xff, stream_);  // whatever it holds must do
  }

  // The i-th call of the graph: its cache and its output.
  void call(std::size_t i) {
    Arguments arguments = arguments_;
    arguments.block_table.data = tables_[i % tables_.size()].data();
    arguments.output.data = outputs_[i].data();
    RunContext context;
    context.stream = static_cast<cudaStream_t>(stream_);
    check(run(plan_, arguments, {workspace_.data(), workspace_.bytes()}, context));
  }

  std::vector<double> expect(std::size_t i) {
    Buffer output(outputs_[i].bytes() / sizeof(std::uint16_t) * sizeof(double));
    Reference r;
    r.query = query_.data();
    r.k = k_.data();
    r.v = v_.data();
    r.k_scale = static_cast<const float*>(k_scale_.data());
    r.v_scale = static_cast<const float*>(v_scale_.data());
    r.table = static_cast<const std::int32_t*>(tables_[i].data());
    r.lengths = static_cast<const std::int32_t*>(lengths_.data());
    r.output = static_cast<double*>(output.data());
    r.cache = work_.cache;
    r.type = type_of_tokens();
    r.block_size = work_.block_size;
    r.columns = columns_;
    r.row_bytes = row_bytes(work_.cache, work_.head_size);
    r.window = work_.window;
    r.batch = static_cast<int>(work_.batch());
    r.num_heads = static_cast<int>(work_.num_heads);
    r.kv_num_heads = static_cast<int>(work_.kv_num_heads);
    r.head_size = static_cast<int>(work_.head_size);
    r.new_tokens = static_cast<int>(work_.new_tokens);
    r.per_channel = work_.per_channel;
    r.scale = 1.0 / std::sqrt(static_cast<double>(work_.head_size));
    r.softcap = static_cast<double>(work_.softcap);
    check(launch_reference(r, stream_), "reference");
    stream_.synchronize("reference");
    return output.read<double>();
  }

  void compare(const std::vector<double>& expected, const std::vector<std::uint16_t>& got, Result& result) const {
    double difference = 0.0, size = 0.0, worst = 0.0;
    for (std::size_t i = 0; i < expected.size();) {
      double row_difference = 0.0, row_size = 0.0;
      for (std::int64_t channel = 0; channel < work_.head_size; ++channel, ++i) {
        const double delta = to_double(got[i], work_.type) - expected[i];
        row_difference += delta * delta;
        row_size += expected[i] * expected[i];
      }
      difference += row_difference;
      size += row_size;
      const double row = std::sqrt(row_difference / row_size);
      if (!(row <= worst)) worst = row;  // takes a NaN
    }
    const double error = std::sqrt(difference / size);
    const double bound = error_bound(work_.type);
    if (!(error <= bound) || !(worst <= kWorstRow * bound)) {
      std::ostringstream message;
      message << "wrong output: relative error " << error << " (at most " << bound << "), of the worst row " << worst
              << " (at most " << kWorstRow * bound << ")";
      throw std::runtime_error(message.str());
    }
    result.error = std::max(result.error, error);
    result.worst_error = std::max(result.worst_error, worst);
  }

  const Work& work_;
  const Stream& stream_;
  std::uint32_t seed_ = 0;
  std::int64_t columns_ = 0, blocks_ = 0;
  Buffer k_, v_, query_, key_, value_, cumulative_, past_, lengths_, k_scale_, v_scale_, workspace_;
  std::vector<Buffer> tables_, outputs_;
  std::vector<std::int32_t> metadata_;
  Arguments arguments_;
  Plan plan_;
};

}  // namespace

Result measure(const Work& work, const std::string& backend, const Stream& stream) {
  return Row(work, backend, stream).measure();
}

}  // namespace octavo::bench
