// The operator's tensors as a table: name, where it lies in Arguments, and what a Problem expects of it.
// validate() and run() compare against the same rows, so that no shape is written twice.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "octavo/paged_attention.h"

namespace octavo::contract {

enum class TensorId : std::uint8_t {
  kQuery,
  kKey,
  kValue,
  kKeyCache,
  kValueCache,
  kCumulativeSequenceLength,
  kPastSeqlens,
  kBlockTable,
  kCosCache,
  kSinCache,
  kSlotMapping,
  kHeadSink,
  kQNormWeight,
  kKNormWeight,
  kKScale,
  kVScale,
  kAttentionMetadata,
  kQueryPositions,
  kAttentionBias,
  kOutput,
  kOutputQk,
  kLse,
};

// What a Problem expects of one tensor.
struct Expectation {
  enum class Presence : std::uint8_t {
    kNeeded,
    kAbsent,
    kIgnored,  // may be there; nobody reads it
  };
  Presence presence = Presence::kAbsent;
  ElementType type = ElementType::kUndefined;
  TensorView shape;  // rank and extents only: strides of an expected output_qk could overflow
};

struct Tensor {
  TensorId id;
  const char* name;
  bool is_cache;  // may be strided over its first three dimensions
  TensorView (*view)(const Arguments& arguments);
  Expectation (*expectation)(const Problem& problem);
  const char* dimensions;  // the shape in words: "(token_count, kv_num_heads*head_size)"
};

std::span<const Tensor> tensors() noexcept;  // in the order of TensorId
const Tensor& tensor(TensorId id) noexcept;

inline bool same_shape(const TensorView& a, const TensorView& b) noexcept {
  if (a.rank != b.rank || a.rank > kMaxRank) return false;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(a.rank); ++axis) {
    if (a.shape[axis] != b.shape[axis]) return false;
  }
  return true;
}

// Row-major without gaps. A tensor without elements is; an axis of extent 1 may have any stride.
bool is_contiguous(const TensorView& view) noexcept;

}  // namespace octavo::contract
