// The second half of the oracle: attention over the caches, with the error that float32 arithmetic may make.
#include "reference/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/operands.h"
#include "support/codecs.h"

namespace octavo::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kUnderflow = 0x1.0p-125;  // below its smallest normal number float32 arithmetic may flush to 0

// K and V of one sequence and KV head as numbers, by position; rows of unmapped positions stay empty.
struct Context {
  std::vector<bool> mapped;
  std::vector<double> key;    // (length, head_size)
  std::vector<double> value;  // (length, v_head_size)
};

Context read_context(const Arguments& a, const Attributes& attributes, const Sizes& s, std::int64_t sequence,
                     std::int64_t length, std::int64_t head, std::int64_t value_offset) {
  const bool latent = attributes.kv_cache_layout == CacheLayout::kLatent;
  const CacheType k_format = k_cache_format(a, attributes);
  const CacheType v_format = v_cache_format(a, attributes);
  Context context;
  context.mapped.resize(static_cast<std::size_t>(length));
  context.key.resize(static_cast<std::size_t>(length * s.head_size));
  context.value.resize(static_cast<std::size_t>(length * s.v_head_size));
  for (std::int64_t k = 0; k < length; ++k) {
    const std::int64_t slot = table_slot(a, s, sequence, k);
    context.mapped[static_cast<std::size_t>(k)] = slot >= 0;
    if (slot < 0) continue;
    const std::byte* key_row = cache_row(a.key_cache, slot, head);
    const std::byte* value_row = latent ? key_row : cache_row(a.value_cache, slot, head);
    for (std::int64_t c = 0; c < s.head_size; ++c) {
      context.key[static_cast<std::size_t>(k * s.head_size + c)] =
          load(k_format, key_row, c) * scale_of(a.k_scale, head, c);
    }
    for (std::int64_t c = 0; c < s.v_head_size; ++c) {
      context.value[static_cast<std::size_t>(k * s.v_head_size + c)] =
          load(v_format, value_row, c + value_offset) *
          scale_of(latent ? a.k_scale : a.v_scale, head, c + value_offset);
    }
  }
  return context;
}

// One query row of one head: what it attends to and what comes out.
struct Row {
  std::vector<std::int64_t> keys;  // attended positions
  std::vector<double> score;       // of each, as it enters softmax
  std::vector<double> error;       // of the score
  std::vector<double> weight;      // probability of each
  double largest = -kInfinity;     // the largest score, sink included
  double lse = -kInfinity;         // without the sink
  double sink_weight = 0.0;        // probability of the sink
  double sink_error = 0.0;         // its relative error
};

std::vector<std::int64_t> attended_positions(const Context& context, std::int64_t position,
                                             const Attributes& attributes, Deviation deviation) {
  std::vector<std::int64_t> keys;
  for (std::int64_t k = 0; k < static_cast<std::int64_t>(context.mapped.size()); ++k) {
    bool seen = context.mapped[static_cast<std::size_t>(k)] || deviation == Deviation::kUnmappedReadsAsZero;
    if (attributes.is_causal != 0 && k > position) seen = false;
    if (attributes.local_window_size > 0 && k <= position - attributes.local_window_size) seen = false;
    if (deviation == Deviation::kNewestKeyMissing && k == position) seen = false;
    if (seen) keys.push_back(k);
  }
  return keys;
}

// The bias of every position, for query `offset` of `sequence`; empty without attention_bias.
std::vector<double> bias_row(const TensorView& bias, std::int64_t sequence, std::int64_t head, std::int64_t offset,
                             std::int64_t length) {
  if (!bias.present()) return {};
  const auto& shape = bias.shape;
  const std::int64_t plane = (shape[0] == 1 ? 0 : sequence) * shape[1] + (shape[1] == 1 ? 0 : head);
  std::vector<double> row(static_cast<std::size_t>(length), 0.0);
  for (std::int64_t k = 0; k < length && k < shape[3] && offset < shape[2]; ++k) {
    row[static_cast<std::size_t>(k)] = real(bias, (plane * shape[2] + offset) * shape[3] + k);
  }
  return row;
}

template <typename Real>
void score_row(Row& row, const double* query, const double* query_error, const Context& context, std::int64_t width,
               const std::vector<double>& bias, const Attributes& attributes, Deviation deviation) {
  const double default_scale = 1.0 / std::sqrt(static_cast<double>(width));
  const Real scale =
      static_cast<Real>(attributes.scale != 0.0f ? static_cast<double>(attributes.scale) : default_scale);
  const Real cap = static_cast<Real>(attributes.softcap);
  const double dot_error = 2.0 + std::sqrt(static_cast<double>(width));
  for (const std::int64_t k : row.keys) {
    const double* key = context.key.data() + k * width;
    Real dot = 0;
    double error = 0.0;
    for (std::int64_t c = 0; c < width; ++c) {
      dot += static_cast<Real>(query[c]) * static_cast<Real>(key[c]);
      error += query_error[c] * std::fabs(key[c]) + dot_error * kRoundoff * std::fabs(query[c] * key[c]);
    }
    Real score = scale * dot;  // 0 where nothing is mapped
    error *= std::fabs(static_cast<double>(scale));
    const Real added = bias.empty() ? Real{0} : static_cast<Real>(bias[static_cast<std::size_t>(k)]);
    if (deviation == Deviation::kBiasBeforeSoftcap) score += added;
    if (cap > 0) {
      score = cap * std::tanh(score / cap);
      error += 4.0 * kRoundoff * std::fabs(static_cast<double>(score));
    }
    if (deviation != Deviation::kBiasBeforeSoftcap) score += added;
    if (std::isfinite(static_cast<double>(score))) error += 2.0 * kRoundoff * std::fabs(static_cast<double>(score));
    row.score.push_back(static_cast<double>(score));
    row.error.push_back(error);
  }
}

// The relative error of exp(score - reference), beside that of the score: of the subtraction and of the exponential.
double exponential_error(double score, double reference) {
  return kRoundoff * (4.0 + 2.0 * std::fabs(score - reference));
}

// Softmax with the sink (nullptr: none) in the denominator.
template <typename Real>
void weigh_row(Row& row, const double* sink) {
  Real largest = -std::numeric_limits<Real>::infinity();
  for (const double score : row.score) {
    // A NaN in the sequence's own tokens makes the whole row NaN, that is, unspecified.
    largest = std::isnan(score) ? std::numeric_limits<Real>::quiet_NaN() : std::max(static_cast<Real>(score), largest);
    if (std::isnan(score)) break;
  }
  row.weight.assign(row.score.size(), 0.0);
  if (largest == -std::numeric_limits<Real>::infinity()) return;  // nothing attended, or all of it at -inf
  Real sum = 0;
  for (const double score : row.score) sum += std::exp(static_cast<Real>(score) - largest);
  row.lse = static_cast<double>(largest + std::log(sum));
  if (sink != nullptr) {
    const Real with_sink = std::max(largest, static_cast<Real>(*sink));
    const Real sink_weight = std::exp(static_cast<Real>(*sink) - with_sink);
    sum = sum * std::exp(largest - with_sink) + sink_weight;
    largest = with_sink;
    row.sink_weight = static_cast<double>(sink_weight / sum);
    row.sink_error = exponential_error(*sink, static_cast<double>(largest));
  }
  row.largest = static_cast<double>(largest);
  for (std::size_t i = 0; i < row.score.size(); ++i) {
    row.weight[i] = static_cast<double>(std::exp(static_cast<Real>(row.score[i]) - largest) / sum);
  }
}

double weight_error(const Row& row, std::size_t i) {
  return row.error[i] + exponential_error(row.score[i], row.largest);
}

// Of a sum over the attended positions, relative to the sum of the magnitudes. An addition rounds by up to the
// roundoff, with a standard deviation of 0.58 of it; three times the root of their number is five standard deviations
// of the sum.
double sum_error(const Row& row) {
  return kRoundoff * (4.0 + 3.0 * std::sqrt(static_cast<double>(row.keys.size())));
}

template <typename Real>
void sum_values(const Row& row, const Context& context, std::int64_t width, double* output, double* output_error) {
  const auto channels = static_cast<std::size_t>(width);
  std::vector<Real> sum(channels, Real{0});
  for (std::size_t i = 0; i < row.keys.size(); ++i) {
    const double* value = context.value.data() + row.keys[i] * width;
    if (row.weight[i] == 0.0) continue;  // such a V may be infinite
    for (std::size_t c = 0; c < channels; ++c) sum[c] += static_cast<Real>(row.weight[i]) * static_cast<Real>(value[c]);
  }
  for (std::size_t c = 0; c < channels; ++c) {
    output[c] = static_cast<double>(sum[c]);
    output_error[c] = row.sink_weight * row.sink_error * std::fabs(output[c]);
  }
  for (std::size_t i = 0; i < row.keys.size(); ++i) {
    const double* value = context.value.data() + row.keys[i] * width;
    if (row.weight[i] == 0.0) continue;
    // The derivative of the output with respect to a score is weight * (value - output).
    const double of_weight = row.weight[i] * weight_error(row, i);
    const double of_sum = row.weight[i] * sum_error(row) + kUnderflow;
    for (std::size_t c = 0; c < channels; ++c) {
      output_error[c] += of_weight * std::fabs(value[c] - output[c]) + of_sum * std::fabs(value[c]);
    }
  }
}

double lse_error(const Row& row) {
  if (row.lse == -kInfinity) return 0.0;
  double error = sum_error(row) + 2.0 * kRoundoff * std::fabs(row.lse);
  for (std::size_t i = 0; i < row.score.size(); ++i) {
    const double share = std::exp(row.score[i] - row.lse);
    if (share > 0.0) error += share * (row.error[i] + exponential_error(row.score[i], row.lse));
  }
  return error;
}

// Row of output_qk: scores or probabilities of the attended positions; the rest stays 0.
void write_scores(const Row& row, std::int64_t kind, std::int64_t context, double* output, double* output_error) {
  double mean_error = row.sink_weight * row.sink_error;
  for (std::size_t i = 0; i < row.keys.size(); ++i) {
    if (row.weight[i] != 0.0) mean_error += row.weight[i] * weight_error(row, i);
  }
  for (std::size_t i = 0; i < row.keys.size(); ++i) {
    const std::int64_t k = row.keys[i];
    if (k >= context) continue;
    output[k] = kind == 1 ? row.score[i] : row.weight[i];
    if (kind == 1) {
      output_error[k] = std::isfinite(row.score[i]) ? row.error[i] : 0.0;
    } else if (row.weight[i] != 0.0) {
      output_error[k] = row.weight[i] * (weight_error(row, i) + mean_error + sum_error(row)) + kUnderflow;
    }
  }
}

// Independent roundings add up like the root of the sum of their squares; four times the largest possible one is seven
// standard deviations.
constexpr double kRoundings = 4.0;

// key_scales: what a code of each channel is worth.
void add_query_rounding(Row& row, const double* query, const Context& context, const std::vector<double>& key_scales,
                        double scale, const Arithmetic& arithmetic) {
  if (arithmetic.query_roundoff == 0.0 && arithmetic.query_floor == 0.0) return;
  const std::size_t width = key_scales.size();
  double largest = 0.0;
  for (std::size_t c = 0; c < width; ++c) largest = std::max(largest, std::fabs(query[c] * key_scales[c]));
  for (std::size_t i = 0; i < row.keys.size(); ++i) {
    const double* key = context.key.data() + static_cast<std::size_t>(row.keys[i]) * width;
    double relative = 0.0;
    double absolute = 0.0;
    for (std::size_t c = 0; c < width; ++c) {
      relative += query[c] * key[c] * query[c] * key[c];
      const double code = key_scales[c] == 0.0 ? 0.0 : key[c] / key_scales[c];
      absolute += code * code;
    }
    row.error[i] += kRoundings * std::fabs(scale) *
                    (arithmetic.query_roundoff * std::sqrt(relative) +
                     (arithmetic.query_floor == 0.0 ? 0.0 : arithmetic.query_floor * largest * std::sqrt(absolute)));
  }
}

void add_weight_rounding(const Row& row, const Context& context, std::int64_t width, const Arithmetic& arithmetic,
                         double* output_error) {
  if (arithmetic.weight_roundoff == 0.0 && arithmetic.weight_floor == 0.0) return;
  const double largest = row.weight.empty() ? 0.0 : *std::max_element(row.weight.begin(), row.weight.end());
  for (std::int64_t c = 0; c < width && largest > 0.0; ++c) {
    double relative = 0.0;
    double absolute = 0.0;
    for (std::size_t i = 0; i < row.keys.size(); ++i) {
      if (row.weight[i] == 0.0) continue;  // such a V may be infinite
      const double value = context.value[static_cast<std::size_t>(row.keys[i] * width + c)];
      relative += row.weight[i] * row.weight[i] * value * value;
      absolute += value * value;
    }
    output_error[c] += kRoundings * (arithmetic.weight_roundoff * std::sqrt(relative) +
                                     arithmetic.weight_floor * largest * std::sqrt(absolute));
  }
}

template <typename Real>
Expected attend(const Prologue& prologue, const Arguments& a, const Attributes& attributes, Deviation deviation,
                const Arithmetic& arithmetic) {
  const Sizes s = sizes_of(a, attributes);
  const std::vector<TokenPlace> places = place_tokens(a, s);
  const auto rows = static_cast<std::size_t>(s.tokens * s.num_heads);
  const std::int64_t qk_context = a.output_qk.present() ? a.output_qk.shape[2] : 0;
  Expected expected;
  expected.output.assign(rows * static_cast<std::size_t>(s.v_head_size), 0.0);
  expected.output_error = expected.output;
  expected.lse.assign(rows, -kInfinity);
  expected.lse_error.assign(rows, 0.0);
  expected.output_qk.assign(rows * static_cast<std::size_t>(qk_context), 0.0);
  expected.output_qk_error = expected.output_qk;
  const std::int64_t value_offset = deviation == Deviation::kValueFromTrailing ? s.head_size - s.v_head_size : 0;

  for (std::int64_t b = 0; b < s.batch; ++b) {
    const std::int64_t begin = integer(a.cumulative_sequence_length, b);
    const std::int64_t end = integer(a.cumulative_sequence_length, b + 1);
    const std::int64_t length = integer(a.past_seqlens, b) + end - begin;
    Context context;
    std::vector<double> key_scales(static_cast<std::size_t>(s.head_size));
    for (std::int64_t h = 0; h < s.num_heads && begin < end; ++h) {
      const std::int64_t group = s.num_heads / s.kv_heads;
      if (h % group == 0) {
        context = read_context(a, attributes, s, b, length, h / group, value_offset);
        for (std::int64_t c = 0; c < s.head_size; ++c) {
          key_scales[static_cast<std::size_t>(c)] = scale_of(a.k_scale, h / group, c);
        }
      }
      const double sink = a.head_sink.present() ? real(a.head_sink, h) : 0.0;
      for (std::int64_t t = begin; t < end; ++t) {
        const TokenPlace& place = places[static_cast<std::size_t>(t)];
        Row row;
        row.keys = attended_positions(context, place.position, attributes, deviation);
        const auto query = static_cast<std::size_t>((t * s.num_heads + h) * s.head_size);
        score_row<Real>(row, prologue.query.data() + query, prologue.query_error.data() + query, context, s.head_size,
                        bias_row(a.attention_bias, b, h, place.offset, length), attributes, deviation);
        const double scale = attributes.scale != 0.0f ? static_cast<double>(attributes.scale)
                                                      : 1.0 / std::sqrt(static_cast<double>(s.head_size));
        add_query_rounding(row, prologue.query.data() + query, context, key_scales, scale, arithmetic);
        weigh_row<Real>(row, a.head_sink.present() ? &sink : nullptr);
        if (deviation == Deviation::kSinkInWeightedSum && !row.weight.empty()) row.weight.back() += row.sink_weight;

        const auto out = static_cast<std::size_t>((t * s.num_heads + h) * s.v_head_size);
        sum_values<Real>(row, context, s.v_head_size, expected.output.data() + out, expected.output_error.data() + out);
        add_weight_rounding(row, context, s.v_head_size, arithmetic, expected.output_error.data() + out);
        const auto flat = static_cast<std::size_t>(h * s.tokens + t);
        expected.lse[flat] = row.lse;
        expected.lse_error[flat] = lse_error(row);
        const std::size_t qk = flat * static_cast<std::size_t>(qk_context);
        write_scores(row, attributes.qk_output, qk_context, expected.output_qk.data() + qk,
                     expected.output_qk_error.data() + qk);
      }
    }
  }
  return expected;
}

}  // namespace

Expected reference_attention(const Prologue& prologue, const Arguments& arguments, const Attributes& attributes,
                             Deviation deviation, const Arithmetic& arithmetic) {
  return deviation == Deviation::kSinglePrecision
             ? attend<float>(prologue, arguments, attributes, deviation, arithmetic)
             : attend<double>(prologue, arguments, attributes, deviation, arithmetic);
}

void reference_run(const Arguments& arguments, const Attributes& attributes, Deviation deviation) {
  const Prologue prologue = reference_prologue(arguments, attributes);
  reference_store(prologue, arguments, attributes);
  const Expected expected = reference_attention(prologue, arguments, attributes, deviation);
  const auto write = [](const MutableTensorView& tensor, const std::vector<double>& values) {
    for (std::int64_t i = 0; i < tensor.element_count(); ++i) {
      store(format_of(tensor.type), tensor.data, i, values[static_cast<std::size_t>(i)]);
    }
  };
  write(arguments.output, expected.output);
  write(arguments.output_qk, expected.output_qk);
  write(arguments.lse, expected.lse);
}

}  // namespace octavo::testing
