// Legal calls that a test breaks in one place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "octavo/paged_attention.h"

namespace octavo::test {

// Two sequences: 3 new tokens after 4 past ones, and 2 new tokens alone. 4 query heads over 2 KV heads of 16 channels,
// 8 blocks of 16 slots, 3 table columns. Owns its memory; the numbers in it are legal, the floats are 0 or 1.
class ValidCall {
 public:
  enum class Base : std::uint8_t {
    kPlain,      // SEPARATE, float32, the required tensors only
    kFull,       // SEPARATE, float32, every optional tensor that goes together
    kPacked,     // plain, with Q, K and V packed in query
    kQuantized,  // plain, with int8 keys PER_CHANNEL and int4 values PER_TENSOR
    kLatent,     // LATENT, float32, v_head_size 8, RoPE over channels 8 to 16
  };

  explicit ValidCall(Base base);
  ValidCall(const ValidCall&) = delete;
  ValidCall& operator=(const ValidCall&) = delete;

  static constexpr std::int64_t kTokens = 5, kBatch = 2, kHeads = 4, kKvHeads = 2, kHeadSize = 16;
  static constexpr std::int64_t kBlocks = 8, kBlockSize = 16, kColumns = 3;

  std::vector<std::int32_t> offsets{0, 3, 5};
  std::vector<std::int32_t> past{4, 0};
  std::vector<std::int32_t> table{5, 2, -1, 7, -1, -1};
  std::vector<std::int32_t> slots{84, 85, 86, 112, -1};
  std::vector<std::int32_t> positions{4, 5, 6, 0, 1};
  std::vector<std::int32_t> metadata{3, 40, 7};
  std::vector<std::int64_t> wide;  // a place for int64 indices
  std::vector<float> scales = std::vector<float>(32, 1.0f);
  std::vector<float> floats = std::vector<float>(1 << 13, 0.0f);  // every read-only float tensor
  std::vector<float> keys = std::vector<float>(1 << 12, 0.0f);
  std::vector<float> values = std::vector<float>(1 << 12, 0.0f);
  // Outputs lie apart: rule D17.
  std::vector<float> results = std::vector<float>(1 << 13, 0.0f);
  std::vector<float> scores = results;
  std::vector<float> log_sums = results;

  Arguments arguments;
  Attributes attributes;

  // validate(), which must succeed.
  Problem problem() const;

  // Points the table (and the slots) at int64 copies.
  void widen_indices();

 private:
  void add_options();
  void quantize();
  void make_latent();
  TensorView read(std::initializer_list<std::int64_t> shape) const {
    return {floats.data(), ElementType::kFloat32, shape};
  }
};

}  // namespace octavo::test
