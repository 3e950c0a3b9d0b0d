// Risk: a test kit that trips over its own tensors, on the machine with a GPU first: a view outside of its buffer, a
// tensor that nobody carries to the device.
#include "support/call.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

#include "support/case_list.h"

namespace octavo::testing {
namespace {

// Bytes from the first to behind the last element; 0 without elements.
std::size_t extent(const TensorView& view) {
  if (view.element_count() == 0) return 0;
  std::int64_t last = 0;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    last += (view.shape[axis] - 1) * view.strides[axis];
  }
  return static_cast<std::size_t>(last + 1) * size_in_bytes(view.type);
}

void expect_views_in_buffers(const Case& spec) {
  SCOPED_TRACE(to_string(spec));
  Call call(spec);
  std::set<std::string> seen;
  for_each_device_tensor(call.arguments, [&](const TensorView& view) {
    const Call::Location location = call.locate(view.data);
    ASSERT_NE(location.tensor, "");
    EXPECT_LE(location.offset + extent(view), call.buffer(location.tensor).size()) << location.tensor;
    seen.insert(location.tensor);
  });
  if (call.arguments.attention_metadata.present()) seen.insert("attention_metadata");
  std::set<std::string> made;
  for (const auto& [name, bytes] : call.snapshot()) made.insert(name);
  EXPECT_EQ(seen, made);
}

TEST(Call, EveryViewLiesInItsBuffer) {
  for (const auto& cases : {single_feature_cases(), type_cases(), size_cases(), length_cases()}) {
    for (const Case& spec : cases) ASSERT_NO_FATAL_FAILURE(expect_views_in_buffers(spec));
  }
  for (std::uint64_t seed = 1; seed <= 400 && !HasFailure(); ++seed) expect_views_in_buffers(random_case(seed));
}

TEST(Call, EveryViewLiesInItsBufferWithoutBlocks) {
  for (const CacheOrder order : {CacheOrder::kTokenMajor, CacheOrder::kHeadMajor, CacheOrder::kKvInterleaved}) {
    Case spec;
    spec.past = spec.added = {};
    spec.spare_blocks = 0;
    spec.cache_order = order;
    expect_views_in_buffers(spec);
  }
}

}  // namespace
}  // namespace octavo::testing
