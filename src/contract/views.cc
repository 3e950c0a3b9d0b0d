// Rules V: every present tensor by itself.
#include "contract/views.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "contract/message.h"
#include "contract/rules.h"

namespace octavo::contract {
namespace {

// Larger than any address space, small enough that byte offsets inside a tensor never overflow 64 bits.
constexpr std::int64_t kMaxBytes = std::int64_t{1} << 60;

// Elements from the first of a strided cache to its last.
constexpr std::int64_t kMaxCacheSpan = kMaxBytes / 8;

// a * b for a, b >= 0, or kMaxBytes + 1 if the product is larger than kMaxBytes.
std::int64_t bounded_product(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product) || product > kMaxBytes) return kMaxBytes + 1;
  return product;
}

using ViewCheck = std::string (*)(const Tensor&, const TensorView&);

template <ViewCheck check>
std::string each_present(const Call& call) {
  for (const Tensor& row : tensors()) {
    const TensorView view = row.view(call.arguments);
    if (!view.present()) continue;
    if (std::string text = check(row, view); !text.empty()) return text;
  }
  return {};
}

constexpr Rule kRules[] = {
    {"V1", "The rank of a tensor is 0 to 4.", each_present<check_rank>},
    {"V2", "The element type of a tensor is one that octavo knows.", each_present<check_element_type>},
    {"V3", "No extent is negative, and a tensor has at most 2^60 bytes (an extent of 0 counting as 1).",
     each_present<check_extents>},
    {"V4", "A tensor that has elements has a data pointer.", each_present<check_pointer>},
    {"V5", "A data pointer is aligned to the element size.", each_present<check_alignment>},
    {"V6", "Every tensor but a cache is contiguous, row-major.", each_present<check_contiguous>},
    {"V7",
     "A cache has a contiguous last dimension and strides of at least 0 that keep its blocks, slots and heads apart.",
     each_present<check_cache_strides>},
};

}  // namespace

std::string check_rank(const Tensor& tensor, const TensorView& view) {
  if (view.rank >= 0 && view.rank <= kMaxRank) return {};
  return cat(tensor.name, ": rank must be 0 to ", kMaxRank, ", got ", view.rank, "; its shape is ", tensor.dimensions);
}

std::string check_element_type(const Tensor& tensor, const TensorView& view) {
  if (view.type <= ElementType::kInt64) return {};
  return cat(tensor.name, ": unknown element type, got enumerator ", static_cast<int>(view.type),
             "; use one of ElementType");
}

std::string check_extents(const Tensor& tensor, const TensorView& view) {
  auto bytes = static_cast<std::int64_t>(size_in_bytes(view.type));
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    if (view.shape[axis] < 0) {
      return cat(tensor.name, ": extents must not be negative, got shape ", shape_text(view), "; its shape is ",
                 tensor.dimensions);
    }
    bytes = bounded_product(bytes, std::max<std::int64_t>(view.shape[axis], 1));
  }
  if (bytes <= kMaxBytes) return {};
  return cat(tensor.name, ": a tensor has at most 2^60 bytes, got shape ", shape_text(view), " of ", name(view.type),
             "; its shape is ", tensor.dimensions);
}

std::string check_pointer(const Tensor& tensor, const TensorView& view) {
  if (view.data != nullptr || view.element_count() == 0) return {};
  return cat(tensor.name, ": has elements, so it needs a data pointer, got null with shape ", shape_text(view),
             "; pass its memory, or an extent of 0");
}

std::string check_alignment(const Tensor& tensor, const TensorView& view) {
  const auto address = reinterpret_cast<std::uintptr_t>(view.data);
  if (address % size_in_bytes(view.type) == 0) return {};
  return cat(tensor.name, ": the data pointer must be aligned to the ", size_in_bytes(view.type), " bytes of ",
             name(view.type), ", got an address that is ", address % size_in_bytes(view.type),
             " past a multiple of it; copy the tensor");
}

std::string check_contiguous(const Tensor& tensor, const TensorView& view) {
  if (tensor.is_cache || is_contiguous(view)) return {};
  TensorView strides = view;
  strides.shape = view.strides;
  return cat(tensor.name, ": must be contiguous, row-major, got shape ", shape_text(view), " with strides ",
             shape_text(strides), "; copy it, only the caches may be strided");
}

std::string check_cache_strides(const Tensor& tensor, const TensorView& view) {
  if (!tensor.is_cache || view.rank == 0) return {};
  TensorView strides = view;
  strides.shape = view.strides;
  const auto refusal = [&](const char* rule, const char* advice) {
    return cat(tensor.name, ": ", rule, ", got shape ", shape_text(view), " with strides ", shape_text(strides), "; ",
               advice);
  };
  const auto too_large = [&] { return refusal("a cache spans at most 2^57 elements", "check the strides"); };
  // Of every axis: a backend may turn the stride of a single block into bytes, though it never adds it.
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    if (view.strides[axis] > kMaxCacheSpan || view.strides[axis] < -kMaxCacheSpan) return too_large();
  }
  if (is_contiguous(view)) return {};
  const auto last = static_cast<std::size_t>(view.rank - 1);
  if (view.shape[last] > 1 && view.strides[last] != 1) {
    return refusal("the last dimension must be contiguous (stride 1)", "keep the channels of a head together");
  }

  // From the innermost axis outwards, by stride: each step must clear everything inside it.
  std::array<std::pair<std::int64_t, std::int64_t>, kMaxRank> axes;  // stride, extent
  axes.fill({0, 1});
  for (std::size_t axis = 0; axis <= last; ++axis) axes[axis] = {view.strides[axis], view.shape[axis]};
  std::sort(axes.begin(), axes.end());
  std::int64_t span = 1;  // elements from the first to past the last of the axes so far
  for (const auto& [stride, extent] : axes) {
    if (extent == 1) continue;
    if (stride < 0) return refusal("strides must not be negative", "pass the view in its memory order");
    if (stride < span) {
      return refusal("blocks, slots and heads must not share memory", "strides count stored elements, not bytes");
    }
    const std::int64_t reach = bounded_product(stride, extent - 1);
    if (reach > kMaxCacheSpan - span) return too_large();
    span += reach;
  }
  return {};
}

std::span<const Rule> view_rules() noexcept {
  return kRules;
}

}  // namespace octavo::contract
