// The parts of Call that make caches, constants and outputs.
#include <algorithm>
#include <cmath>
#include <limits>

#include "support/call.h"
#include "support/call_streams.h"
#include "support/codecs.h"
#include "support/random.h"

namespace octavo::testing {
namespace {

// The largest value of a format in units of its scale, to choose scales that clip a few values.
double largest_code(CacheType format) {
  switch (format) {
    case CacheType::kInt8: return 127.0;
    case CacheType::kFloat8E4M3FN: return 448.0;
    case CacheType::kInt4: return 7.0;
    default: return 6.0;
  }
}

}  // namespace

void Call::make_scales() {
  const auto make = [&](const char* name, QuantType granularity, CacheType format, double magnitude, Stream stream) {
    // Values past 2.5 standard deviations clip.
    const double base = 2.5 * magnitude / largest_code(format);
    if (granularity == QuantType::kPerTensor) {
      const TensorView scale = add(name, ElementType::kFloat32, {1});
      set(scale, 0, base);
      return scale;
    }
    const TensorView scale = add(name, ElementType::kFloat32, {spec_.kv_num_heads, 1, spec_.head_size});
    for (std::int64_t i = 0; i < scale.element_count(); ++i) {
      set(scale, i, base * (0.6 + 0.8 * unit(hash(spec_.seed, {stream, i}))));
    }
    return scale;
  };
  if (spec_.k_quant != QuantType::kNone) {
    arguments.k_scale = make("k_scale", spec_.k_quant, spec_.k_format(), spec_.key_magnitude, kKScale);
  }
  if (!spec_.latent && spec_.v_quant != QuantType::kNone) {
    arguments.v_scale = make("v_scale", spec_.v_quant, spec_.v_format(), spec_.value_magnitude, kVScale);
  }
}

double Call::scale_of(const TensorView& scale, std::int64_t head, std::int64_t channel) const {
  if (!scale.present()) return 1.0;
  return get(scale, scale.element_count() == 1 ? 0 : head * spec_.head_size + channel);
}

void Call::fill_row(CacheType format, std::byte* row, const TensorView& scale, std::int64_t head, std::int64_t stream,
                    const Row& content, double magnitude) {
  const std::uint64_t bits = hash(spec_.seed, {stream, content.identity, content.position, head});
  for (std::int64_t c = 0; c < spec_.head_size; ++c) {
    const double value = magnitude * normal(mix(bits ^ static_cast<std::uint64_t>(c)));
    store(format, row, c, value / scale_of(scale, head, c));
  }
}

void Call::make_caches() {
  const CacheType k_format = spec_.k_format();
  const CacheType v_format = spec_.v_format();
  const std::int64_t blocks = num_blocks_;
  const std::int64_t tokens = spec_.block_size;
  const std::int64_t heads = spec_.kv_num_heads;
  const auto width = [&](CacheType format) {
    return row_bytes(format, spec_.head_size) / static_cast<std::int64_t>(size_in_bytes(storage_of(format)));
  };
  // One tensor for both needs one element type.
  const bool interleaved = spec_.cache_order == CacheOrder::kKvInterleaved && !spec_.latent && k_format == v_format;
  const auto lay_out = [&](MutableTensorView& cache) {
    if (spec_.cache_order != CacheOrder::kHeadMajor) return;
    cache.strides[1] = cache.shape[3];
    cache.strides[2] = tokens * cache.shape[3];
  };

  arguments.key_cache = MutableTensorView(nullptr, storage_of(k_format), {blocks, tokens, heads, width(k_format)});
  if (!spec_.latent) {
    arguments.value_cache = MutableTensorView(nullptr, storage_of(v_format), {blocks, tokens, heads, width(v_format)});
  }
  if (interleaved) {
    const MutableTensorView both =
        add_mutable("key_cache", storage_of(k_format), {blocks, 2 * tokens, heads, width(k_format)});
    const std::int64_t half = tokens * heads * width(k_format);
    arguments.key_cache.data = arguments.value_cache.data = both.data;
    if (blocks > 0) {  // in an empty tensor there is nothing behind K
      arguments.value_cache.data =
          static_cast<std::byte*>(both.data) + half * static_cast<std::int64_t>(size_in_bytes(both.type));
    }
    arguments.key_cache.strides[0] = arguments.value_cache.strides[0] = 2 * half;
  } else {
    arguments.key_cache = add_mutable("key_cache", storage_of(k_format), {blocks, tokens, heads, width(k_format)});
    lay_out(arguments.key_cache);
    if (!spec_.latent) {
      arguments.value_cache =
          add_mutable("value_cache", storage_of(v_format), {blocks, tokens, heads, width(v_format)});
      lay_out(arguments.value_cache);
    }
  }
  fill_caches(blocks);
}

void Call::fill_caches(std::int64_t num_blocks) {
  const auto fill = [&](const MutableTensorView& cache, CacheType format, const TensorView& scale, Stream stream,
                        double magnitude) {
    for (std::int64_t slot = 0; slot < num_blocks * spec_.block_size; ++slot) {
      const auto live = readable_rows_.find(slot);
      for (std::int64_t head = 0; head < spec_.kv_num_heads; ++head) {
        std::byte* row = cache_row(cache, slot, head);
        if (live != readable_rows_.end()) {
          fill_row(format, row, scale, head, stream, live->second, magnitude);
          continue;
        }
        for (std::int64_t c = 0; c < spec_.head_size; ++c) {
          const std::uint64_t salt = mix(static_cast<std::uint64_t>(slot * 131 + c));
          store_code(format, row, c, spec_.hostile ? poison_code(format, salt) : encode(format, 0.0));
        }
      }
    }
  };
  fill(arguments.key_cache, spec_.k_format(), arguments.k_scale, kPastKey, spec_.key_magnitude);
  if (!spec_.latent) {
    fill(arguments.value_cache, spec_.v_format(), arguments.v_scale, kPastValue, spec_.value_magnitude);
  }
}

void Call::make_rotary() {
  const std::int64_t width = spec_.rotary_width();
  if (width == 0) return;
  const std::int64_t positions = spec_.position_limit();
  arguments.cos_cache = add("cos_cache", spec_.type, {positions + 2, width / 2});
  arguments.sin_cache = add("sin_cache", spec_.type, {positions + 2, width / 2});
  for (std::int64_t p = 0; p < positions + 2; ++p) {
    for (std::int64_t i = 0; i < width / 2; ++i) {
      // Rows past the last position of any token are never read.
      const bool unread = p >= positions && spec_.hostile;
      const double angle =
          static_cast<double>(p) * std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(width));
      const double nan = std::numeric_limits<double>::quiet_NaN();
      set(arguments.cos_cache, p * (width / 2) + i, unread ? nan : std::cos(angle));
      set(arguments.sin_cache, p * (width / 2) + i, unread ? nan : std::sin(angle));
    }
  }
}

void Call::make_bias() {
  if (spec_.bias == BiasShape::kAbsent) return;
  const bool one_batch = spec_.bias == BiasShape::kBroadcastBatch || spec_.bias == BiasShape::kBroadcastBoth;
  const bool one_head = spec_.bias == BiasShape::kBroadcastHeads || spec_.bias == BiasShape::kBroadcastBoth;
  std::int64_t queries = 0;
  std::int64_t context = 0;
  for (std::int64_t b = 0; b < spec_.batch_size(); ++b) {
    queries = std::max(queries, spec_.added[static_cast<std::size_t>(b)]);
    context = std::max(context, spec_.kv_length(b));
  }
  queries += 1;
  context += 3;
  const std::int64_t batches = one_batch ? 1 : spec_.batch_size();
  const std::int64_t heads = one_head ? 1 : spec_.num_heads;
  arguments.attention_bias = add("attention_bias", spec_.type, {batches, heads, queries, context});
  const auto used = [&](std::int64_t b, std::int64_t j, std::int64_t k) {
    for (std::int64_t s = one_batch ? 0 : b; s < (one_batch ? spec_.batch_size() : b + 1); ++s) {
      if (j < spec_.added[static_cast<std::size_t>(s)] && k < spec_.kv_length(s)) return true;
    }
    return false;
  };
  std::int64_t index = 0;
  for (std::int64_t b = 0; b < batches; ++b) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t j = 0; j < queries; ++j) {
        for (std::int64_t k = 0; k < context; ++k, ++index) {
          const std::uint64_t bits = hash(spec_.seed, {kBias, b, h, j, k});
          double value = normal(bits);
          if (spec_.bias_masks && mix(bits) % 7 == 0) value = -std::numeric_limits<double>::infinity();
          if (!used(b, j, k)) value = spec_.hostile ? std::numeric_limits<double>::quiet_NaN() : 0.0;
          set(arguments.attention_bias, index, value);
        }
      }
    }
  }
}

void Call::make_metadata() {
  if (spec_.metadata == Metadata::kAbsent) return;
  std::int64_t queries = 0;
  std::int64_t context = 0;
  for (std::int64_t b = 0; b < spec_.batch_size(); ++b) {
    queries = std::max(queries, spec_.added[static_cast<std::size_t>(b)]);
    context = std::max(context, spec_.kv_length(b));
  }
  if (spec_.metadata == Metadata::kTight) {
    arguments.attention_metadata = add("attention_metadata", ElementType::kInt32, {3});
    set_integer(arguments.attention_metadata, 0, queries);
    set_integer(arguments.attention_metadata, 1, context);
    set_integer(arguments.attention_metadata, 2, context);
    return;
  }
  const bool loose = spec_.metadata == Metadata::kLoose;
  arguments.attention_metadata = add("attention_metadata", ElementType::kInt32, {2});
  set_integer(arguments.attention_metadata, 0, loose ? 2 * queries + 7 : 0);
  set_integer(arguments.attention_metadata, 1, loose ? columns_ * spec_.block_size + 100 : 0);
}

void Call::make_outputs() {
  const std::int64_t tokens = spec_.token_count();
  arguments.output = add_mutable("output", spec_.type, {tokens, spec_.num_heads * spec_.output_width()});
  if (spec_.lse) arguments.lse = add_mutable("lse", ElementType::kFloat32, {spec_.num_heads, tokens});
  if (spec_.qk_output != 0) {
    std::int64_t context = columns_ * spec_.block_size;
    if (arguments.attention_metadata.present()) {
      const std::int64_t bound = integer(arguments.attention_metadata, 1);
      if (bound != 0) context = std::min(context, bound);
    }
    arguments.output_qk = add_mutable("output_qk", spec_.output_qk_type, {spec_.num_heads, tokens, context});
  }
  poison_outputs();
}

void Call::poison_outputs() {
  for (const MutableTensorView& tensor : {arguments.output, arguments.output_qk, arguments.lse}) {
    const CacheType format = format_of(tensor.type);
    for (std::int64_t i = 0; i < tensor.element_count(); ++i) {
      store_code(format, tensor.data, i, poison_code(format, static_cast<std::uint64_t>(i)));
    }
  }
}

}  // namespace octavo::testing
