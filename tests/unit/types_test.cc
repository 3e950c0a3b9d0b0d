// The small types of the public API: Status, TensorView, names, FeatureSet, Executor.
#include <gtest/gtest.h>

#include <atomic>
#include <ostream>
#include <string>
#include <vector>

#include "octavo/paged_attention.h"

namespace octavo::test {
namespace {

TEST(StatusTest, CarriesCodeAndMessage) {
  EXPECT_TRUE(Status().ok());
  EXPECT_EQ(Status().message(), "");
  const Status status = Status::invalid_argument("query: absent");
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "query: absent");
}

TEST(TensorViewTest, IsRowMajor) {
  float data[24] = {};
  const MutableTensorView view(data, ElementType::kFloat32, {2, 3, 4});
  EXPECT_EQ(view.rank, 3);
  EXPECT_EQ(view.strides[0], 12);
  EXPECT_EQ(view.strides[1], 4);
  EXPECT_EQ(view.strides[2], 1);
  EXPECT_EQ(view.element_count(), 24);
  const TensorView constant = view;
  EXPECT_EQ(constant.data, data);
  EXPECT_EQ(constant.shape, view.shape);
}

TEST(TensorViewTest, TellsAbsentFromEmpty) {
  EXPECT_FALSE(TensorView().present());
  EXPECT_EQ(TensorView().element_count(), 0);
  const TensorView empty(nullptr, ElementType::kInt32, {0});
  EXPECT_TRUE(empty.present());
  EXPECT_EQ(empty.element_count(), 0);
}

TEST(TensorViewTest, KeepsARankThatItCannotHold) {
  const TensorView view(nullptr, ElementType::kInt32, {1, 2, 3, 4, 5});
  EXPECT_EQ(view.rank, 5);
  EXPECT_EQ(view.shape[3], 4);
}

TEST(Names, AreTheSchemas) {
  EXPECT_STREQ(name(ElementType::kFloat8E4M3FN), "float8e4m3fn");
  EXPECT_STREQ(name(ElementType::kUndefined), "undefined");
  EXPECT_STREQ(name(static_cast<ElementType>(77)), "unknown");
  EXPECT_STREQ(name(QuantType::kPerChannel), "PER_CHANNEL");
  EXPECT_STREQ(name(CacheType::kTensorType), "");
  EXPECT_STREQ(name(CacheType::kFloat4E2M1), "float4e2m1");
  EXPECT_STREQ(name(CacheLayout::kLatent), "LATENT");
  EXPECT_STREQ(name(DeviceKind::kCpu), "cpu");
}

TEST(FeatureSetTest, EveryFeatureHasItsOwnName) {
  std::vector<std::string> names;
  for (int bit = 0; bit < kFeatureCount; ++bit) {
    names.push_back(name(Feature{1u << bit}));
    EXPECT_NE(names.back(), "unknown") << bit;
    for (std::size_t other = 0; other + 1 < names.size(); ++other) EXPECT_NE(names[other], names.back());
  }
  EXPECT_STREQ(name(Feature{1u << kFeatureCount}), "unknown");
}

TEST(FeatureSetTest, IsASet) {
  const FeatureSet some = Feature::kRope | Feature::kSoftcap;
  EXPECT_TRUE(some.contains(Feature::kRope));
  EXPECT_FALSE(some.contains(Feature::kLse));
  EXPECT_EQ(some.without(Feature::kRope), FeatureSet(Feature::kSoftcap));
  EXPECT_TRUE(FeatureSet::all().contains(some));
  EXPECT_EQ(to_string(some), "rope, softcap");
  EXPECT_EQ(to_string({}), "none");
}

TEST(RowBytes, RoundsFourBitRowsUp) {
  EXPECT_EQ(row_bytes(CacheType::kInt4, 15), 8);
  EXPECT_EQ(row_bytes(CacheType::kFloat4E2M1, 16), 8);
  EXPECT_EQ(row_bytes(CacheType::kInt8, 16), 16);
  EXPECT_EQ(row_bytes(CacheType::kBFloat16, 16), 32);
  EXPECT_EQ(row_bytes(CacheType::kFloat32, 16), 64);
}

struct NamedExecutor {
  const char* name;
  Executor& (*get)() noexcept;
};

void PrintTo(const NamedExecutor& executor, std::ostream* out) {
  *out << executor.name;
}

class Executors : public testing::TestWithParam<NamedExecutor> {};

TEST_P(Executors, RunEveryIndexOnce) {
  Executor& executor = GetParam().get();
  EXPECT_GE(executor.concurrency(), 1);
  for (const std::int64_t count : {0, 1, 2, 1000}) {
    std::vector<std::atomic<int>> runs(static_cast<std::size_t>(count));
    executor.parallel_for(
        count,
        [](void* context, std::int64_t index) {
          auto& counters = *static_cast<std::vector<std::atomic<int>>*>(context);
          counters[static_cast<std::size_t>(index)].fetch_add(1);
        },
        &runs);
    for (const auto& times : runs) EXPECT_EQ(times.load(), 1);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Executors,
                         testing::Values(NamedExecutor{"serial", serial_executor},
                                         NamedExecutor{"default", default_executor}),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(SerialExecutor, StaysOnTheCallingThreadInOrder) {
  std::vector<std::int64_t> order;
  serial_executor().parallel_for(
      3, [](void* context, std::int64_t index) { static_cast<std::vector<std::int64_t>*>(context)->push_back(index); },
      &order);
  EXPECT_EQ(order, (std::vector<std::int64_t>{0, 1, 2}));
  EXPECT_EQ(serial_executor().concurrency(), 1);
}

}  // namespace
}  // namespace octavo::test
