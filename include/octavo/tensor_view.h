// TensorView: a tensor that somebody else owns. Pointer, element type, shape, strides.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace octavo {

enum class ElementType : std::uint8_t {
  kUndefined = 0,  // an absent tensor
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat8E4M3FN,
  kInt8,
  kUint8,  // two 4-bit codes a byte: logical element 2i in the low nibble of byte i, 2i+1 in the high one
  kInt32,
  kInt64,
};

// Bytes of one stored element; 0 for kUndefined.
constexpr std::size_t size_in_bytes(ElementType type) noexcept {
  switch (type) {
    case ElementType::kUndefined: return 0;
    case ElementType::kFloat8E4M3FN:
    case ElementType::kInt8:
    case ElementType::kUint8: return 1;
    case ElementType::kFloat16:
    case ElementType::kBFloat16: return 2;
    case ElementType::kFloat32:
    case ElementType::kInt32: return 4;
    case ElementType::kInt64: return 8;
  }
  return 0;
}

// The ONNX spelling: "float32", "float8e4m3fn", ... ; "undefined" for an absent tensor.
const char* name(ElementType type) noexcept;

inline constexpr int kMaxRank = 4;

// Pointer is const void* (TensorView) or void* (MutableTensorView). Shape and strides count stored elements (bytes
// for kUint8). Caches may have any non-negative strides over their first three dimensions, so that head-major (HND)
// pools and pools with K and V interleaved in one tensor need no copy; the last dimension is always contiguous. Every
// other tensor is contiguous, row-major. A default-constructed view is an absent tensor.
template <typename Pointer>
struct BasicTensorView {
  Pointer data = nullptr;
  ElementType type = ElementType::kUndefined;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> strides{};

  BasicTensorView() noexcept = default;

  // A contiguous, row-major tensor. A rank above kMaxRank is kept in `rank` (validation refuses it by name).
  BasicTensorView(Pointer data_, ElementType type_, std::initializer_list<std::int64_t> shape_) noexcept
      : data(data_), type(type_), rank(static_cast<int>(shape_.size())) {
    std::size_t axis = 0;
    for (const std::int64_t extent : shape_) {
      if (axis < shape.size()) shape[axis++] = extent;
    }
    set_contiguous_strides();
  }

  // A mutable view converts to a read-only one.
  template <std::convertible_to<Pointer> Other>
  BasicTensorView(const BasicTensorView<Other>& other) noexcept  // NOLINT(google-explicit-constructor)
      : data(other.data), type(other.type), rank(other.rank), shape(other.shape), strides(other.strides) {}

  // Present and absent are told apart by the type: a tensor with no elements may have a null pointer.
  bool present() const noexcept { return type != ElementType::kUndefined; }

  std::int64_t element_count() const noexcept {
    std::int64_t count = 1;
    for (int axis = 0; axis < rank && axis < kMaxRank; ++axis) count *= shape[static_cast<std::size_t>(axis)];
    return present() ? count : 0;
  }

  // Unsigned, so that a shape too large for 64 bits wraps (validation refuses it by name) instead of being undefined.
  void set_contiguous_strides() noexcept {
    std::uint64_t stride = 1;
    for (int axis = (rank < kMaxRank ? rank : kMaxRank) - 1; axis >= 0; --axis) {
      strides[static_cast<std::size_t>(axis)] = static_cast<std::int64_t>(stride);
      stride *= static_cast<std::uint64_t>(shape[static_cast<std::size_t>(axis)]);
    }
  }
};

using TensorView = BasicTensorView<const void*>;
using MutableTensorView = BasicTensorView<void*>;

}  // namespace octavo
