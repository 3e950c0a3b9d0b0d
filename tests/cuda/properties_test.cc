// What must hold between runs on CUDA, bit for bit: independence of the batch, of launch bounds and of repetition.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "cuda/device_call.h"
#include "cuda/varied_cases.h"

namespace octavo::testing {
namespace {

const std::vector<std::string> kResults = {"output", "lse", "key_cache", "value_cache"};

std::vector<std::byte> rows(Call& call, std::int64_t begin, std::int64_t end) {
  const auto row = static_cast<std::ptrdiff_t>(call.arguments.output.shape[1] *
                                               static_cast<std::int64_t>(size_in_bytes(call.arguments.output.type)));
  const std::byte* data = call.buffer("output").data();
  return {data + begin * row, data + end * row};
}

// A prompt, a split sequence and one-token steps beside each other; few and many rows on average.
TEST(CudaBatchInvariance, SameBitsAloneAndAmong300) {
  for (Case batch : varied_cases()) {
    batch.past.clear();
    batch.added.clear();
    for (std::int64_t b = 0; b < 300; ++b) {
      batch.past.push_back(b * 37 % 150);
      batch.added.push_back(b % 17 == 0 ? 9 : b % 13 == 0 ? 0 : b % 23 == 0 ? 2 + b / 23 % 7 : 1);
    }
    batch.past[150] = 1030;
    batch.added[151] = 70;
    batch.past[152] = 1500;
    batch.added[152] = 40;
    Call together(batch);
    for (const std::string& backend : cuda_backends(together)) {
      run_on_cuda(together, backend);
      std::int64_t begin = 0;
      for (std::int64_t b = 0; b < 300; ++b) {
        const auto i = static_cast<std::size_t>(b);
        const std::int64_t end = begin + batch.added[i];
        if (b % 23 == 0 || (b >= 150 && b <= 152)) {
          Case alone = batch;
          alone.past = {batch.past[i]};
          alone.added = {batch.added[i]};
          alone.identities = {b};
          Call single(alone);
          run_on_cuda(single, backend);
          EXPECT_EQ(rows(single, 0, batch.added[i]), rows(together, begin, end))
              << backend << ": sequence " << b << " of " << batch.name << " has other bits alone";
        }
        begin = end;
      }
    }
  }
}

// attention_metadata bounds the launch and never a mask.
TEST(CudaBounds, SameBitsForAnyMetadata) {
  for (Case spec : varied_cases()) {
    spec.past = {2500, 0, 1023, 40};
    spec.added = {1, 33, 2, 17};
    spec.metadata = Metadata::kAbsent;
    Call absent(spec);
    for (const std::string& backend : cuda_backends(absent)) {
      run_on_cuda(absent, backend);
      for (const Metadata metadata : {Metadata::kTight, Metadata::kLoose, Metadata::kUnknown}) {
        Case bounded = spec;
        bounded.metadata = metadata;
        Call call(bounded);
        run_on_cuda(call, backend);
        EXPECT_EQ(first_difference(absent, call, kResults), "") << to_string(bounded);
      }
    }
  }
}

TEST(CudaRepetition, SameBitsEveryTime) {
  for (Case spec : varied_cases()) {
    spec.past = {2500, 0, 1023, 40};
    spec.added = {1, 33, 2, 17};
    Call first(spec);
    for (const std::string& backend : cuda_backends(first)) {
      run_on_cuda(first, backend);
      for (int repetition = 0; repetition < 5; ++repetition) {
        Call again(spec);
        run_on_cuda(again, backend);
        EXPECT_EQ(first_difference(first, again, kResults), "") << to_string(spec);
      }
    }
  }
}

// Lengths past which a prompt's keys, a row's chunks and int32 products no longer fit what short cases exercise.
TEST(CudaLengths, LongContextsAgreeWithTheOracle) {
  for (Case spec : varied_cases()) {
    for (const std::int64_t past : {4095, 33000, 70001}) {
      spec.num_heads = spec.kv_num_heads * 2;
      spec.past = {past, 3};
      spec.added = {1, 2};
      Call call(spec);
      for (const std::string& backend : cuda_backends(call)) {
        EXPECT_TRUE(judge_on_cuda(call, backend, Placement::kAligned));
      }
    }
  }
}

TEST(CudaLengths, AQuarterMillionPositionsAgreeWithTheOracle) {
  Case spec = varied_cases()[1];
  spec.num_heads = 2;
  spec.past = {262143};
  spec.added = {1};
  Call call(spec);
  for (const std::string& backend : cuda_backends(call)) EXPECT_TRUE(judge_on_cuda(call, backend, Placement::kAligned));
}

TEST(CudaLengths, AThousandSequencesAgreeWithTheOracle) {
  for (Case spec : varied_cases()) {
    if (spec.head_size > 128) continue;  // the oracle's time
    spec.past.clear();
    spec.added.clear();
    for (std::int64_t b = 0; b < 1000; ++b) {
      spec.past.push_back(b * 31 % 70);
      spec.added.push_back(b % 19 == 0 ? 4 : b % 7 == 0 ? 0 : 1);
    }
    Call call(spec);
    for (const std::string& backend : cuda_backends(call))
      EXPECT_TRUE(judge_on_cuda(call, backend, Placement::kAligned));
  }
}

// The blocks of a small call, moved to the end of a pool of more than 2^31 elements: the same bits.
TEST(CudaPools, OffsetsPastTwoToTheThirtyOne) {
  for (Case spec : varied_cases()) {
    spec.past = {20, 0, 100};
    spec.added = {1, 18, 2};
    Call small(spec);
    const std::int64_t blocks = small.arguments.key_cache.shape[0];
    const std::int64_t moved = (std::int64_t{1} << 31) / small.arguments.key_cache.strides[0] + 1;
    for (const std::string& backend : cuda_backends(small)) {
      Call large(spec);
      std::vector<MutableTensorView*> caches = {&large.arguments.key_cache};
      if (!spec.latent) caches.push_back(&large.arguments.value_cache);
      for (MutableTensorView* cache : caches) cache->shape[0] = blocks + moved;
      for (std::int64_t b = 0; b < spec.batch_size(); ++b) {
        for (std::int64_t i = 0; i < large.arguments.block_table.shape[1]; ++i) {
          const std::int64_t block = large.table(b, i);
          if (block >= 0 && block < blocks) large.set_table(b, i, block + moved);
        }
      }
      if (spec.slots != SlotStyle::kAbsent) {
        for (std::int64_t t = 0; t < spec.token_count(); ++t) {
          if (large.slot(t) >= 0) large.set_slot(t, large.slot(t) + moved * spec.block_size);
        }
      }
      DeviceCall device(large);
      const Status status = device.prepare(backend);
      ASSERT_TRUE(status.ok()) << status.message();
      device.upload();
      std::vector<std::unique_ptr<DeviceMemory>> pools;
      const auto move = [&](MutableTensorView& cache) {
        const auto block_bytes = static_cast<std::size_t>(cache.strides[0]) * size_in_bytes(cache.type);
        pools.push_back(std::make_unique<DeviceMemory>(block_bytes * static_cast<std::size_t>(blocks + moved)));
        std::byte* const end = pools.back()->data() + block_bytes * static_cast<std::size_t>(moved);
        expect_success(cudaMemcpyAsync(end, cache.data, block_bytes * static_cast<std::size_t>(blocks),
                                       cudaMemcpyDeviceToDevice, test_stream()),
                       "cudaMemcpyAsync");
        cache.data = pools.back()->data();
      };
      move(device.arguments().key_cache);
      if (!spec.latent) move(device.arguments().value_cache);
      const Status launched = device.launch(test_stream());
      ASSERT_TRUE(launched.ok()) << launched.message();
      device.download();
      run_on_cuda(small, backend);
      EXPECT_EQ(first_difference(small, large, {"output", "lse"}), "") << to_string(spec);
    }
  }
}

}  // namespace
}  // namespace octavo::testing
