// The tiles of the general backend on devices of every size, without a device. Risk: a legal head that some devices
// refuse, or whose results there depend on how many rows a step has.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "cuda/general/shared_memory.h"
#include "cuda/general/tuning.h"

namespace octavo::cuda {
namespace {

// What a block can have at most: compute capability 8.6, 8.9 and 12.0; 8.0; 9.0 and 10.0.
constexpr int kSmallest = 99 * 1024;
const std::vector<int> kDevices = {kSmallest, 163 * 1024, 227 * 1024};

Problem problem_of(ElementType type, bool latent, std::int64_t head_size, std::int64_t tokens) {
  Problem problem;
  problem.element_type = type;
  problem.cache_layout = latent ? CacheLayout::kLatent : CacheLayout::kSeparate;
  problem.head_size = problem.v_head_size = head_size;
  problem.num_heads = problem.kv_num_heads = 1;
  problem.batch_size = 1;
  problem.token_count = problem.max_query_len_bound = tokens;
  return problem;
}

template <typename Check>
void for_each_head(const Check& check) {
  for (const ElementType type : {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16}) {
    for (const bool latent : {false, true}) {
      for (std::int64_t head_size = 8; head_size <= (latent ? 1024 : 512); head_size += 8) {
        SCOPED_TRACE(testing::Message() << name(type) << (latent ? " LATENT " : " SEPARATE ") << head_size);
        check(problem_of(type, latent, head_size, 1), problem_of(type, latent, head_size, 4096));
      }
    }
  }
}

TEST(SharedMemory, EveryLegalHeadFitsEveryDevice) {
  for (const int device : kDevices) {
    for_each_head([device](const Problem& few, const Problem& many) {
      for (const Problem* problem : {&few, &many}) {
        const Instance instance = choose_instance(*problem, device);
        ASSERT_GT(instance.rows, 0);
        EXPECT_GE(instance.head_bucket, problem->head_size);
        EXPECT_LE(shared_bytes(*problem, instance), device);
      }
    });
  }
}

// Longer key tiles would regroup the sums of the softmax.
TEST(SharedMemory, KeyTilesDoNotDependOnTheNumberOfRows) {
  for (const int device : kDevices) {
    for_each_head([device](const Problem& few, const Problem& many) {
      const Instance for_few = choose_instance(few, device);
      const Instance for_many = choose_instance(many, device);
      EXPECT_EQ(for_few.head_bucket, for_many.head_bucket);
      EXPECT_EQ(for_few.keys, for_many.keys);
      EXPECT_LE(for_few.rows, for_many.rows);
    });
  }
}

TEST(SharedMemory, ADeviceWithoutRoomHasNoInstance) {
  EXPECT_EQ(choose_instance(problem_of(ElementType::kFloat16, false, 512, 1), 48 * 1024).rows, 0);
}

// Pieces that overlap would show as wrong results only on a GPU.
TEST(SharedMemory, PiecesLieApart) {
  for_each_head([](const Problem& few, const Problem&) {
    const int element = static_cast<int>(size_in_bytes(few.element_type));
    const int width = static_cast<int>(few.head_size);
    const bool latent = few.cache_layout == CacheLayout::kLatent;
    const Instance instance = choose_instance(few, kSmallest);
    const SharedLayout layout = shared_layout(element, instance.rows, instance.keys, width, width, latent);
    std::vector<std::pair<int, int>> pieces = {// first byte, bytes
                                               {layout.query, instance.rows * layout.row_stride * element},
                                               {layout.keys, instance.keys * layout.row_stride * element},
                                               {layout.scores, instance.rows * layout.score_stride * 4},
                                               {layout.key_offsets, 2 * instance.keys * 8},
                                               {layout.value_offsets, 2 * instance.keys * 8},
                                               {layout.row_state, kRowStateWords * instance.rows * 4},
                                               {layout.live_keys, 16},
                                               {layout.hull, 8}};
    if (!latent) pieces.emplace_back(layout.values, instance.keys * layout.value_stride * element);
    if (element == 2) pieces.emplace_back(layout.weights, instance.rows * layout.weight_stride * 2);
    std::sort(pieces.begin(), pieces.end());
    int end = 0;
    for (const auto& [first, bytes] : pieces) {
      EXPECT_GE(first, end);
      EXPECT_EQ(first % 16, 0);
      end = first + bytes;
    }
    EXPECT_LE(end, layout.bytes);
  });
}

}  // namespace
}  // namespace octavo::cuda
