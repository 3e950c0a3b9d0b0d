// Call: the tensors of a Case, in guarded memory, and the Arguments and Attributes that point at them.
//
// Hostile memory (Case::hostile): whatever the contract says must not be read holds NaN (extreme codes where the format
// has none) or wild ids: the tail of a sequence's last page, blocks of no sequence, blocks that no query's window
// reaches, pages of sequences without new tokens, rows that the call itself is going to write, table columns past the
// length, the padding of attention_bias and of the rotary caches, everything about padding tokens. Outputs hold NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "octavo/paged_attention.h"
#include "support/case.h"
#include "support/guarded_buffer.h"

namespace octavo::testing {

class Call {
 public:
  // The bytes of every tensor, by name.
  using Snapshot = std::map<std::string, std::vector<std::byte>, std::less<>>;

  explicit Call(const Case& spec);

  // Public on purpose: tests alter single fields to break a rule or to bend a stride.
  Arguments arguments;
  Attributes attributes;

  const Case& spec() const { return spec_; }

  // Integer tensors by element, whatever their index type.
  std::int64_t table(std::int64_t sequence, std::int64_t column) const;
  void set_table(std::int64_t sequence, std::int64_t column, std::int64_t block);
  std::int64_t slot(std::int64_t token) const;
  void set_slot(std::int64_t token, std::int64_t slot);
  std::int32_t& int32_at(std::string_view tensor, std::int64_t index);

  // The slot that the table gives position `position` of `sequence`; -1 where it is unmapped.
  std::int64_t table_slot(std::int64_t sequence, std::int64_t position) const;

  // Element `index` of a float tensor (query, output, attention_bias, ...), decoded; and its replacement.
  double get(const TensorView& tensor, std::int64_t index) const;
  void set(const TensorView& tensor, std::int64_t index, double value);

  // The stored bytes of one row of a cache: `slot`, head `head`.
  std::byte* cache_row(const MutableTensorView& cache, std::int64_t slot, std::int64_t head) const;

  // Where `data` lies: the tensor whose buffer it is in and the bytes before it. The end of a buffer is in it only
  // where the buffer is empty. An empty name: in none.
  struct Location {
    std::string tensor;
    std::size_t offset = 0;
  };
  Location locate(const void* data) const;

  GuardedBuffer& buffer(std::string_view tensor);
  bool has_buffer(std::string_view tensor) const { return buffers_.find(tensor) != buffers_.end(); }

  // Fills output, output_qk and lse with NaN again, for another run on the same inputs.
  void poison_outputs();

  Snapshot snapshot() const;
  void restore(const Snapshot& snapshot);
  // Names of the tensors whose bytes differ from `before`, comma-separated; empty when none.
  std::string changes_since(const Snapshot& before) const;
  // Names of the tensors whose guard zones were written; empty when none.
  std::string broken_guards() const;

 private:
  struct Token {
    std::int64_t sequence = -1;  // -1: padding
    std::int64_t offset = 0;     // within the sequence's new tokens
    std::int64_t position = 0;   // index in the sequence, past included
  };
  struct Row {
    std::int64_t identity;
    std::int64_t position;
  };

  TensorView add(const char* name, ElementType type, std::initializer_list<std::int64_t> shape);
  MutableTensorView add_mutable(const char* name, ElementType type, std::initializer_list<std::int64_t> shape);
  void set_integer(const TensorView& tensor, std::int64_t index, std::int64_t value);
  std::int64_t integer(const TensorView& tensor, std::int64_t index) const;

  void make_lengths();
  void make_positions();
  void make_table();
  void make_slots();
  void make_activations();
  void make_scales();
  void make_caches();
  void fill_caches(std::int64_t num_blocks);
  void make_rotary();
  void make_bias();
  void make_metadata();
  void make_outputs();
  std::int64_t first_visible_position(std::int64_t sequence) const;
  double scale_of(const TensorView& scale, std::int64_t head, std::int64_t channel) const;
  void fill_row(CacheType format, std::byte* row, const TensorView& scale, std::int64_t head, std::int64_t stream,
                const Row& content, double magnitude);

  Case spec_;
  std::map<std::string, GuardedBuffer, std::less<>> buffers_;
  std::vector<Token> tokens_;
  std::vector<std::int64_t> query_positions_;  // per token, as the masks see them
  std::map<std::int64_t, Row> readable_rows_;  // slot -> what it holds before the call
  std::int64_t columns_ = 0;
  std::int64_t num_blocks_ = 0;
  std::vector<std::int64_t> spare_blocks_;
};

// Calls visit(view) for every tensor of `arguments` that is there and, on a GPU, lies in device memory: all but
// attention_metadata. Views of inputs are TensorView&, all others MutableTensorView&.
template <typename Visit>
void for_each_device_tensor(Arguments& a, const Visit& visit) {
  for (TensorView* view : {&a.query, &a.key, &a.value, &a.cumulative_sequence_length, &a.past_seqlens, &a.block_table,
                           &a.cos_cache, &a.sin_cache, &a.slot_mapping, &a.head_sink, &a.q_norm_weight,
                           &a.k_norm_weight, &a.k_scale, &a.v_scale, &a.query_positions, &a.attention_bias}) {
    if (view->present()) visit(*view);
  }
  for (MutableTensorView* view : {&a.key_cache, &a.value_cache, &a.output, &a.output_qk, &a.lse}) {
    if (view->present()) visit(*view);
  }
}

}  // namespace octavo::testing
