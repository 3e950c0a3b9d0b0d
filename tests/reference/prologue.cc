// The first half of the oracle: what the new tokens' Q, K and V are, where K and V go, and how they are stored.
#include <algorithm>
#include <cmath>

#include "reference/operands.h"
#include "reference/reference.h"
#include "support/codecs.h"

namespace octavo::testing {
namespace {

// Root-mean-square norm of one head: x / sqrt(mean(x^2) + epsilon) * weight.
void normalise(double* x, double* error, const TensorView& weight, std::int64_t width, double epsilon) {
  double squares = 0.0;
  for (std::int64_t c = 0; c < width; ++c) squares += x[c] * x[c];
  const double factor = 1.0 / std::sqrt(squares / static_cast<double>(width) + epsilon);
  for (std::int64_t c = 0; c < width; ++c) {
    x[c] *= factor * real(weight, c);
    error[c] = 8.0 * kRoundoff * std::fabs(x[c]);
  }
}

void rotate(double* x, double* error, const Arguments& a, const Attributes& attributes, std::int64_t position) {
  const std::int64_t half = a.cos_cache.shape[1];
  for (std::int64_t i = 0; i < half; ++i) {
    const bool interleaved = attributes.rotary_interleaved != 0;
    const std::int64_t first = attributes.rotary_offset + (interleaved ? 2 * i : i);
    const std::int64_t second = attributes.rotary_offset + (interleaved ? 2 * i + 1 : i + half);
    const double cosine = real(a.cos_cache, position * half + i);
    const double sine = real(a.sin_cache, position * half + i);
    const double x1 = x[first], x2 = x[second];
    const double e1 = error[first], e2 = error[second];
    x[first] = x1 * cosine - x2 * sine;
    x[second] = x2 * cosine + x1 * sine;
    error[first] = std::fabs(cosine) * e1 + std::fabs(sine) * e2 +
                   2.0 * kRoundoff * (std::fabs(x1 * cosine) + std::fabs(x2 * sine));
    error[second] = std::fabs(cosine) * e2 + std::fabs(sine) * e1 +
                    2.0 * kRoundoff * (std::fabs(x2 * cosine) + std::fabs(x1 * sine));
  }
}

}  // namespace

CacheType k_cache_format(const Arguments& arguments, const Attributes& attributes) {
  return attributes.k_cache_dtype != CacheType::kTensorType ? attributes.k_cache_dtype
                                                            : format_of(arguments.key_cache.type);
}

CacheType v_cache_format(const Arguments& arguments, const Attributes& attributes) {
  if (attributes.kv_cache_layout == CacheLayout::kLatent) return k_cache_format(arguments, attributes);
  return attributes.v_cache_dtype != CacheType::kTensorType ? attributes.v_cache_dtype
                                                            : format_of(arguments.value_cache.type);
}

std::byte* cache_row(const MutableTensorView& cache, std::int64_t slot, std::int64_t head) {
  const std::int64_t block_size = cache.shape[1];
  const std::int64_t elements =
      slot / block_size * cache.strides[0] + slot % block_size * cache.strides[1] + head * cache.strides[2];
  return static_cast<std::byte*>(cache.data) + elements * static_cast<std::int64_t>(size_in_bytes(cache.type));
}

double scale_of(const TensorView& scale, std::int64_t head, std::int64_t channel) {
  if (!scale.present()) return 1.0;
  return real(scale, scale.rank == 1 ? 0 : head * scale.shape[2] + channel);
}

Prologue reference_prologue(const Arguments& a, const Attributes& attributes) {
  const Sizes s = sizes_of(a, attributes);
  const std::vector<TokenPlace> places = place_tokens(a, s);
  const bool packed = !a.key.present();
  const bool latent = attributes.kv_cache_layout == CacheLayout::kLatent;
  const std::int64_t q_width = s.num_heads * s.head_size;
  const std::int64_t kv_width = s.kv_heads * s.head_size;
  Prologue p;
  p.query.assign(static_cast<std::size_t>(s.tokens * q_width), 0.0);
  p.key.assign(static_cast<std::size_t>(s.tokens * kv_width), 0.0);
  p.query_error = p.query;
  p.key_error = p.key;
  if (!latent) p.value = p.key;
  p.slot.assign(static_cast<std::size_t>(s.tokens), -1);

  for (std::int64_t t = 0; t < s.tokens; ++t) {
    const TokenPlace& place = places[static_cast<std::size_t>(t)];
    if (place.sequence < 0) continue;
    double* query = p.query.data() + t * q_width;
    double* key = p.key.data() + t * kv_width;
    const std::int64_t row = t * a.query.shape[1];
    for (std::int64_t i = 0; i < q_width; ++i) query[i] = real(a.query, row + i);
    for (std::int64_t i = 0; i < kv_width; ++i) {
      key[i] = packed ? real(a.query, row + q_width + i) : real(a.key, t * kv_width + i);
      if (latent) continue;
      p.value[static_cast<std::size_t>(t * kv_width + i)] =
          packed ? real(a.query, row + q_width + kv_width + i) : real(a.value, t * kv_width + i);
    }
    const auto prepare = [&](double* heads, double* errors, std::int64_t count, const TensorView& weight) {
      for (std::int64_t h = 0; h < count; ++h) {
        double* x = heads + h * s.head_size;
        double* error = errors + h * s.head_size;
        if (weight.present()) normalise(x, error, weight, s.head_size, static_cast<double>(attributes.qk_norm_epsilon));
        if (attributes.do_rotary != 0) rotate(x, error, a, attributes, place.position);
      }
    };
    prepare(query, p.query_error.data() + t * q_width, s.num_heads, a.q_norm_weight);
    prepare(key, p.key_error.data() + t * kv_width, s.kv_heads, a.k_norm_weight);

    std::int64_t slot =
        a.slot_mapping.present() ? integer(a.slot_mapping, t) : table_slot(a, s, place.sequence, place.index);
    if (slot < 0 || slot >= s.num_blocks * s.block_size) slot = -1;
    if (slot >= 0) std::replace(p.slot.begin(), p.slot.begin() + t, slot, std::int64_t{-1});  // the last token stays
    p.slot[static_cast<std::size_t>(t)] = slot;
  }
  return p;
}

void reference_store(const Prologue& prologue, const Arguments& a, const Attributes& attributes) {
  const Sizes s = sizes_of(a, attributes);
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    const std::int64_t slot = prologue.slot[static_cast<std::size_t>(t)];
    if (slot < 0) continue;
    for (std::int64_t g = 0; g < s.kv_heads; ++g) {
      for (std::int64_t c = 0; c < s.head_size; ++c) {
        const auto i = static_cast<std::size_t>((t * s.kv_heads + g) * s.head_size + c);
        store(k_cache_format(a, attributes), cache_row(a.key_cache, slot, g), c,
              prologue.key[i] / scale_of(a.k_scale, g, c));
        if (prologue.value.empty()) continue;
        store(v_cache_format(a, attributes), cache_row(a.value_cache, slot, g), c,
              prologue.value[i] / scale_of(a.v_scale, g, c));
      }
    }
  }
}

}  // namespace octavo::testing
