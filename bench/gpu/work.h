// One decode row of the table, as its name says it: "CACHE HEADS/KVxSIZE CONTEXTxBATCH[ VARIANT]".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "octavo/problem.h"

namespace octavo::bench {

struct Work {
  std::string name;
  CacheType cache = CacheType::kFloat16;
  ElementType type = ElementType::kFloat16;  // of Q, the new K and V, and the output
  bool per_channel = false;
  std::int64_t num_heads = 0, kv_num_heads = 0, head_size = 0;
  std::vector<std::int64_t> lengths;  // KV length of each sequence, its new tokens included
  std::int64_t new_tokens = 1;        // query tokens of each sequence
  std::int64_t block_size = 256;
  std::int64_t window = -1;
  float softcap = 0.0f;

  std::int64_t batch() const { return static_cast<std::int64_t>(lengths.size()); }
  std::int64_t longest() const;
  bool quantized() const { return cache != CacheType::kFloat16 && cache != CacheType::kBFloat16; }
  // Bytes of K and V that attention has to read once: what a row's floor is made of. Q and the output are left out.
  std::int64_t bytes() const;
};

// CACHE is fp16, bf16, int8, fp8 or int4; Q has the cache's type, or fp16. CONTEXTxBATCH is "4096x32", several of them
// joined by "+", or "64..16384x32" (log-spaced, ascending). VARIANT is any of "bf16 Q", "PER_CHANNEL", "page N"
// (default 256), "window N", "softcap N", "N tokens". Throws std::invalid_argument.
Work parse_work(const std::string& name);

}  // namespace octavo::bench
