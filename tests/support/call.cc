#include "support/call.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "support/call_streams.h"
#include "support/codecs.h"
#include "support/random.h"

namespace octavo::testing {
namespace {

constexpr std::int64_t kWildBlock = std::int64_t{1} << 30;
constexpr std::int64_t kWildNegative = -7;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

std::int64_t wild(std::int64_t salt) {
  return salt % 2 == 0 ? kWildBlock : kWildNegative;
}

}  // namespace

Call::Call(const Case& spec) : spec_(spec) {
  make_lengths();
  make_positions();
  make_table();
  make_slots();
  make_activations();
  make_scales();
  make_caches();
  make_rotary();
  make_bias();
  make_metadata();
  make_outputs();

  attributes.num_heads = spec_.num_heads;
  attributes.kv_num_heads = spec_.kv_num_heads;
  attributes.scale = spec_.scale;
  attributes.softcap = spec_.softcap;
  attributes.local_window_size = spec_.window;
  attributes.is_causal = spec_.causal ? 1 : 0;
  attributes.do_rotary = spec_.rotary == Rotary::kNone ? 0 : 1;
  attributes.rotary_interleaved = spec_.rotary == Rotary::kInterleaved ? 1 : 0;
  attributes.rotary_offset = spec_.rotary_offset;
  attributes.k_quant_type = spec_.k_quant;
  attributes.v_quant_type = spec_.latent ? QuantType::kNone : spec_.v_quant;
  attributes.k_cache_dtype = is_four_bit(spec_.k_cache) ? spec_.k_cache : CacheType::kTensorType;
  attributes.v_cache_dtype = !spec_.latent && is_four_bit(spec_.v_cache) ? spec_.v_cache : CacheType::kTensorType;
  attributes.kv_cache_layout = spec_.latent ? CacheLayout::kLatent : CacheLayout::kSeparate;
  attributes.v_head_size = spec_.latent ? spec_.v_head_size : 0;
  attributes.qk_output = spec_.qk_output;
}

MutableTensorView Call::add_mutable(const char* name, ElementType type, std::initializer_list<std::int64_t> shape) {
  MutableTensorView view(nullptr, type, shape);
  const std::size_t width = size_in_bytes(type);
  const auto [entry, inserted] =
      buffers_.try_emplace(name, static_cast<std::size_t>(view.element_count()) * width, width);
  view.data = entry->second.data();
  return view;
}

TensorView Call::add(const char* name, ElementType type, std::initializer_list<std::int64_t> shape) {
  return add_mutable(name, type, shape);
}

void Call::set_integer(const TensorView& tensor, std::int64_t index, std::int64_t value) {
  // The views of inputs are read-only to the library; the bytes are ours.
  if (tensor.type == ElementType::kInt64) {
    static_cast<std::int64_t*>(const_cast<void*>(tensor.data))[index] = value;
  } else {
    static_cast<std::int32_t*>(const_cast<void*>(tensor.data))[index] = static_cast<std::int32_t>(value);
  }
}

std::int64_t Call::integer(const TensorView& tensor, std::int64_t index) const {
  return tensor.type == ElementType::kInt64 ? static_cast<const std::int64_t*>(tensor.data)[index]
                                            : static_cast<const std::int32_t*>(tensor.data)[index];
}

std::int64_t Call::table(std::int64_t sequence, std::int64_t column) const {
  return integer(arguments.block_table, sequence * columns_ + column);
}
void Call::set_table(std::int64_t sequence, std::int64_t column, std::int64_t block) {
  set_integer(arguments.block_table, sequence * columns_ + column, block);
}
std::int64_t Call::slot(std::int64_t token) const {
  return integer(arguments.slot_mapping, token);
}
void Call::set_slot(std::int64_t token, std::int64_t slot) {
  set_integer(arguments.slot_mapping, token, slot);
}
std::int32_t& Call::int32_at(std::string_view tensor, std::int64_t index) {
  return buffer(tensor).as<std::int32_t>()[index];
}

std::int64_t Call::table_slot(std::int64_t sequence, std::int64_t position) const {
  const std::int64_t column = position / spec_.block_size;
  const std::int64_t block = column < columns_ ? table(sequence, column) : -1;
  return block < 0 ? -1 : block * spec_.block_size + position % spec_.block_size;
}

double Call::get(const TensorView& tensor, std::int64_t index) const {
  return load(format_of(tensor.type), tensor.data, index);
}
void Call::set(const TensorView& tensor, std::int64_t index, double value) {
  store(format_of(tensor.type), const_cast<void*>(tensor.data), index, value);
}

std::byte* Call::cache_row(const MutableTensorView& cache, std::int64_t slot, std::int64_t head) const {
  const std::int64_t elements =
      slot / spec_.block_size * cache.strides[0] + slot % spec_.block_size * cache.strides[1] + head * cache.strides[2];
  return static_cast<std::byte*>(cache.data) + elements * static_cast<std::int64_t>(size_in_bytes(cache.type));
}

Call::Location Call::locate(const void* data) const {
  const auto* byte = static_cast<const std::byte*>(data);
  for (const auto& [name, buffer] : buffers_) {
    if (byte < buffer.data() || byte > buffer.data() + buffer.size()) continue;
    if (byte == buffer.data() + buffer.size() && buffer.size() > 0) continue;
    return {name, static_cast<std::size_t>(byte - buffer.data())};
  }
  return {};
}

GuardedBuffer& Call::buffer(std::string_view tensor) {
  return buffers_.find(tensor)->second;
}

Call::Snapshot Call::snapshot() const {
  Snapshot snapshot;
  for (const auto& [name, buffer] : buffers_) snapshot.emplace(name, buffer.copy());
  return snapshot;
}

void Call::restore(const Snapshot& snapshot) {
  for (const auto& [name, bytes] : snapshot) buffer(name).restore(bytes);
}

std::string Call::changes_since(const Snapshot& before) const {
  std::string names;
  for (const auto& [name, bytes] : before) {
    if (!buffers_.find(name)->second.equals(bytes)) names += (names.empty() ? "" : ", ") + name;
  }
  return names;
}

std::string Call::broken_guards() const {
  std::string names;
  for (const auto& [name, buffer] : buffers_) {
    if (!buffer.intact()) names += (names.empty() ? "" : ", ") + name;
  }
  return names;
}

void Call::make_lengths() {
  const std::int64_t batch = spec_.batch_size();
  arguments.cumulative_sequence_length = add("cumulative_sequence_length", ElementType::kInt32, {batch + 1});
  arguments.past_seqlens = add("past_seqlens", ElementType::kInt32, {batch});
  std::int64_t total = 0;
  set_integer(arguments.cumulative_sequence_length, 0, 0);
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t past = spec_.past[static_cast<std::size_t>(b)];
    const std::int64_t added = spec_.added[static_cast<std::size_t>(b)];
    total += added;
    set_integer(arguments.past_seqlens, b, past);
    set_integer(arguments.cumulative_sequence_length, b + 1, total);
    for (std::int64_t j = 0; j < added; ++j) tokens_.push_back({b, j, past + j});
  }
  tokens_.resize(static_cast<std::size_t>(spec_.token_count()));
}

void Call::make_positions() {
  Random random(hash(spec_.seed, {1001}));
  for (const Token& token : tokens_) {
    std::int64_t position = token.position;
    if (spec_.positions == Positions::kTree && token.sequence >= 0) {
      position =
          random.between(spec_.past[static_cast<std::size_t>(token.sequence)], spec_.kv_length(token.sequence) + 2);
    }
    query_positions_.push_back(position);
  }
  if (spec_.positions == Positions::kAbsent) return;
  arguments.query_positions = add("query_positions", ElementType::kInt32, {spec_.token_count()});
  for (std::size_t t = 0; t < tokens_.size(); ++t) {
    const bool padding = tokens_[t].sequence < 0;
    set_integer(arguments.query_positions, static_cast<std::int64_t>(t),
                padding && spec_.hostile ? wild(static_cast<std::int64_t>(t)) : query_positions_[t]);
  }
}

std::int64_t Call::first_visible_position(std::int64_t sequence) const {
  if (spec_.window < 0) return 0;
  std::int64_t lowest = std::numeric_limits<std::int64_t>::max();
  for (std::size_t t = 0; t < tokens_.size(); ++t) {
    if (tokens_[t].sequence == sequence) lowest = std::min(lowest, query_positions_[t]);
  }
  return std::max<std::int64_t>(0, lowest - spec_.window + 1);
}

void Call::make_table() {
  const std::int64_t batch = spec_.batch_size();
  std::int64_t longest = 0;
  std::int64_t shared_columns = std::numeric_limits<std::int64_t>::max();
  for (std::int64_t b = 0; b < batch; ++b) {
    longest = std::max(longest, ceil_div(spec_.kv_length(b), spec_.block_size));
    shared_columns = std::min(shared_columns, spec_.past[static_cast<std::size_t>(b)] / spec_.block_size);
  }
  if (spec_.table != TableStyle::kSharedPrefix || batch == 0) shared_columns = 0;
  columns_ = spec_.table_columns > 0 ? spec_.table_columns : spec_.table_columns < 0 ? 0 : longest + 2;

  // Every column of every sequence owns a block, used or not, so that equal seeds give equal tables at every step.
  num_blocks_ = batch * columns_ + spec_.spare_blocks;
  std::vector<std::int64_t> pool(static_cast<std::size_t>(num_blocks_));
  for (std::size_t i = 0; i < pool.size(); ++i) pool[i] = static_cast<std::int64_t>(i);
  Random random(hash(spec_.seed, {1002}));
  if (spec_.table != TableStyle::kContiguous) {
    for (std::size_t i = pool.size(); i > 1; --i) {
      std::swap(pool[i - 1], pool[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)))]);
    }
  }
  spare_blocks_.assign(pool.begin() + static_cast<std::ptrdiff_t>(batch * columns_), pool.end());

  arguments.block_table = add("block_table", spec_.index_type, {batch, columns_});
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t used = ceil_div(spec_.kv_length(b), spec_.block_size);
    const std::int64_t added = spec_.added[static_cast<std::size_t>(b)];
    const std::int64_t first = added == 0 ? used : first_visible_position(b) / spec_.block_size;
    const std::int64_t ring = spec_.table == TableStyle::kRing
                                  ? std::clamp<std::int64_t>(ceil_div(spec_.window + added - 1, spec_.block_size) + 1,
                                                             1, std::max<std::int64_t>(columns_, 1))
                                  : columns_;
    for (std::int64_t i = 0; i < columns_; ++i) {
      const std::int64_t owner = i < shared_columns ? 0 : b;
      std::int64_t block = pool[static_cast<std::size_t>(owner * columns_ + i % ring)];
      if (i >= used) {
        block = spec_.hostile ? wild(b + i) : -1;
      } else if (i < first && spec_.below_window == BelowWindow::kUnmapped && spec_.window > 0) {
        block = -1;
      }
      set_table(b, i, block);
    }
    const std::int64_t whole_past = spec_.past[static_cast<std::size_t>(b)] / spec_.block_size;
    for (std::int64_t hole = 0; hole < spec_.unmapped_holes && first < whole_past; ++hole) {
      set_table(b, random.between(first, whole_past - 1), -1);
    }
    if (added == 0) continue;
    for (std::int64_t k = first * spec_.block_size; k < spec_.kv_length(b); ++k) {
      const bool shared = k / spec_.block_size < shared_columns;
      const std::int64_t slot = table_slot(b, k);
      if (slot >= 0) readable_rows_.insert_or_assign(slot, Row{spec_.identity(shared ? 0 : b), k});
    }
  }
}

void Call::make_slots() {
  Random random(hash(spec_.seed, {1003}));
  const bool present = spec_.slots != SlotStyle::kAbsent;
  if (present) arguments.slot_mapping = add("slot_mapping", spec_.index_type, {spec_.token_count()});
  const std::int64_t elsewhere = static_cast<std::int64_t>(spare_blocks_.size()) * spec_.block_size;
  std::int64_t next_elsewhere = 0;
  for (std::size_t t = 0; t < tokens_.size(); ++t) {
    const Token& token = tokens_[t];
    std::int64_t slot = token.sequence < 0 ? -1 : table_slot(token.sequence, token.position);
    if (token.sequence < 0) {
      if (present) set_slot(static_cast<std::int64_t>(t), spec_.hostile ? wild(static_cast<std::int64_t>(t)) : -1);
      continue;
    }
    const double draw = unit(random.next());
    if (spec_.slots == SlotStyle::kSomeUnset && draw < 0.4) slot = -1;
    if (spec_.slots == SlotStyle::kElsewhere && draw < 0.25) slot = -1;
    if (spec_.slots == SlotStyle::kElsewhere && draw >= 0.7 && next_elsewhere < elsewhere) {
      slot = spare_blocks_[static_cast<std::size_t>(next_elsewhere / spec_.block_size)] * spec_.block_size +
             next_elsewhere % spec_.block_size;
      ++next_elsewhere;
    }
    if (present) set_slot(static_cast<std::int64_t>(t), slot);
    if (slot >= 0) readable_rows_.erase(slot);  // this call writes it; before that it holds poison
  }
}

void Call::make_activations() {
  const std::int64_t tokens = spec_.token_count();
  const std::int64_t q_width = spec_.num_heads * spec_.head_size;
  const std::int64_t kv_width = spec_.kv_num_heads * spec_.head_size;
  const bool packed = spec_.packed_qkv && !spec_.latent;
  arguments.query = add("query", spec_.type, {tokens, packed ? q_width + 2 * kv_width : q_width});
  if (!packed) arguments.key = add("key", spec_.type, {tokens, kv_width});
  if (!packed && !spec_.latent) arguments.value = add("value", spec_.type, {tokens, kv_width});

  const auto fill = [&](const TensorView& tensor, std::int64_t first, std::int64_t width, Stream stream,
                        double magnitude) {
    const CacheType format = format_of(spec_.type);
    for (std::int64_t t = 0; t < tokens; ++t) {
      const Token& token = tokens_[static_cast<std::size_t>(t)];
      auto* row = static_cast<std::byte*>(const_cast<void*>(tensor.data)) +
                  (t * tensor.shape[1] + first) * static_cast<std::int64_t>(size_in_bytes(tensor.type));
      const std::uint64_t bits =
          token.sequence < 0 ? 0 : hash(spec_.seed, {stream, spec_.identity(token.sequence), token.position});
      for (std::int64_t i = 0; i < width; ++i) {
        const std::uint64_t draw = mix(bits ^ static_cast<std::uint64_t>(i));
        if (token.sequence < 0 && spec_.hostile) {
          store_code(format, row, i, poison_code(format, draw));
        } else {
          store(format, row, i, token.sequence < 0 ? 0.0 : magnitude * normal(draw));
        }
      }
    }
  };
  fill(arguments.query, 0, q_width, kQuery, spec_.query_magnitude);
  if (packed) {
    fill(arguments.query, q_width, kv_width, kKey, spec_.key_magnitude);
    fill(arguments.query, q_width + kv_width, kv_width, kValue, spec_.value_magnitude);
  } else {
    fill(arguments.key, 0, kv_width, kKey, spec_.key_magnitude);
    if (arguments.value.present()) fill(arguments.value, 0, kv_width, kValue, spec_.value_magnitude);
  }

  if (spec_.head_sink && !spec_.latent) {
    arguments.head_sink = add("head_sink", spec_.type, {spec_.num_heads});
    for (std::int64_t h = 0; h < spec_.num_heads; ++h) {
      const double u = unit(hash(spec_.seed, {kSink, h}));
      set(arguments.head_sink, h, spec_.sink_low + u * (spec_.sink_high - spec_.sink_low));
    }
  }
  if (spec_.qk_norm && !spec_.latent) {
    arguments.q_norm_weight = add("q_norm_weight", spec_.type, {spec_.head_size});
    arguments.k_norm_weight = add("k_norm_weight", spec_.type, {spec_.head_size});
    for (std::int64_t c = 0; c < spec_.head_size; ++c) {
      set(arguments.q_norm_weight, c, 1.0 + 0.3 * normal(hash(spec_.seed, {kQNorm, c})));
      set(arguments.k_norm_weight, c, 1.0 + 0.3 * normal(hash(spec_.seed, {kKNorm, c})));
    }
  }
}

}  // namespace octavo::testing
