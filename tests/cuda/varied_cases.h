// Cases with different kernels and features behind them, for the tests of properties.
#pragma once

#include <vector>

#include "support/case.h"

namespace octavo::testing {

inline std::vector<Case> varied_cases() {
  Case plain;
  plain.name = "plain";
  plain.head_size = 32;
  plain.lse = true;

  Case grouped = plain;
  grouped.name = "grouped";
  grouped.type = ElementType::kFloat16;
  grouped.num_heads = 16;
  grouped.head_size = 64;
  grouped.slots = SlotStyle::kDerived;

  Case quantized =
      with_cache(plain, CacheType::kInt8, QuantType::kPerChannel, CacheType::kFloat8E4M3FN, QuantType::kPerTensor);
  quantized.name = "quantized";
  quantized.type = ElementType::kFloat16;
  quantized.head_size = 128;
  quantized.head_sink = quantized.qk_norm = true;
  quantized.rotary = Rotary::kHalf;
  quantized.softcap = 5.0f;

  Case windowed;
  windowed.name = "windowed";
  windowed.type = ElementType::kBFloat16;
  windowed.window = 37;
  windowed.head_sink = true;

  Case four_bit =
      with_cache(plain, CacheType::kInt4, QuantType::kPerChannel, CacheType::kFloat4E2M1, QuantType::kPerTensor);
  four_bit.name = "four_bit";
  four_bit.type = ElementType::kBFloat16;
  four_bit.packed_qkv = true;

  Case latent;
  latent.name = "latent";
  latent.type = ElementType::kFloat16;
  latent.latent = true;
  latent.num_heads = 6;
  latent.kv_num_heads = 1;
  latent.head_size = 576;
  latent.v_head_size = 512;
  latent.scale = 0.05f;

  Case int8 = with_cache(plain, CacheType::kInt8, QuantType::kPerChannel, CacheType::kInt8, QuantType::kPerTensor);
  int8.name = "int8";
  int8.type = ElementType::kFloat16;
  int8.num_heads = 9;
  int8.kv_num_heads = 3;
  int8.head_size = 64;
  int8.head_sink = true;
  int8.slots = SlotStyle::kDerived;

  Case int4 = with_cache(plain, CacheType::kInt4, QuantType::kPerChannel, CacheType::kInt4, QuantType::kPerChannel);
  int4.name = "int4";
  int4.type = ElementType::kBFloat16;
  int4.head_size = 128;
  int4.softcap = 30.0f;
  return {plain, grouped, quantized, windowed, four_bit, latent, int8, int4};
}

}  // namespace octavo::testing
