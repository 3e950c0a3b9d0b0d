// What every tensor view has to be by itself. Shared by validate() and run(): between the two, pointers and the strides
// of the caches may change.
#pragma once

#include <string>

#include "contract/tensors.h"

namespace octavo::contract {

// Empty, or why this view cannot be read. Each may rely on those before it.
std::string check_rank(const Tensor& tensor, const TensorView& view);
std::string check_element_type(const Tensor& tensor, const TensorView& view);
std::string check_extents(const Tensor& tensor, const TensorView& view);
std::string check_pointer(const Tensor& tensor, const TensorView& view);
std::string check_alignment(const Tensor& tensor, const TensorView& view);
std::string check_contiguous(const Tensor& tensor, const TensorView& view);
std::string check_cache_strides(const Tensor& tensor, const TensorView& view);

}  // namespace octavo::contract
