// Case: one call of the operator as plain data. Call (call.h) builds the tensors of it, the oracle (reference/) says
// what must come out, and every backend that accepts must agree.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "octavo/paged_attention.h"

namespace octavo::testing {

enum class TableStyle : std::uint8_t {
  kContiguous,    // blocks in order
  kShuffled,      // blocks anywhere in the pool
  kSharedPrefix,  // the whole blocks of the past that all sequences have come from the first sequence
  kRing,          // a window's worth of blocks per sequence, reused round and round (needs a window)
};

enum class BelowWindow : std::uint8_t {  // table entries of blocks that no query's window reaches
  kStale,                                // a block id of memory that holds poison by now
  kUnmapped,                             // -1
};

enum class CacheOrder : std::uint8_t {
  kTokenMajor,     // (num_blocks, block_size, heads, channels), contiguous: NHD
  kHeadMajor,      // (num_blocks, heads, block_size, channels): HND
  kKvInterleaved,  // one tensor (num_blocks, 2, block_size, heads, channels) holds K and V
};

enum class SlotStyle : std::uint8_t {
  kAbsent,     // no slot_mapping: slots follow from the table
  kDerived,    // slot_mapping says what the table would
  kSomeUnset,  // some are -1
  kElsewhere,  // some are -1, some point at blocks of no sequence
};

enum class BiasShape : std::uint8_t { kAbsent, kFull, kBroadcastBatch, kBroadcastHeads, kBroadcastBoth };
enum class Rotary : std::uint8_t { kNone, kHalf, kInterleaved };
enum class Positions : std::uint8_t { kAbsent, kSequential, kTree };  // kTree: arbitrary, repeated, gaps
enum class Metadata : std::uint8_t { kAbsent, kTight, kLoose, kUnknown };

struct Case {
  std::string name;
  std::uint64_t seed = 1;

  // sizes
  std::int64_t num_heads = 4;
  std::int64_t kv_num_heads = 2;
  std::int64_t head_size = 16;
  std::int64_t block_size = 16;
  std::vector<std::int64_t> past = {0};       // tokens in the cache, per sequence
  std::vector<std::int64_t> added = {5};      // tokens of this call, per sequence
  std::vector<std::int64_t> identities = {};  // which values a sequence has; empty: 0, 1, 2, ...
  std::int64_t padding_tokens = 0;            // after the last sequence
  std::int64_t table_columns = 0;             // 0: two more than the longest sequence needs
  std::int64_t spare_blocks = 3;              // blocks of no sequence

  // types
  ElementType type = ElementType::kFloat32;
  CacheType k_cache = CacheType::kTensorType;
  CacheType v_cache = CacheType::kTensorType;
  QuantType k_quant = QuantType::kNone;
  QuantType v_quant = QuantType::kNone;
  ElementType index_type = ElementType::kInt32;
  ElementType output_qk_type = ElementType::kFloat32;

  // attributes
  bool latent = false;
  std::int64_t v_head_size = 0;  // latent only
  float scale = 0.0f;
  float softcap = 0.0f;
  std::int64_t window = -1;
  bool causal = true;
  Rotary rotary = Rotary::kNone;
  std::int64_t rotary_dim = 0;  // 0: the whole head behind rotary_offset
  std::int64_t rotary_offset = 0;
  std::int64_t qk_output = 0;

  // optional tensors
  bool packed_qkv = false;
  bool head_sink = false;
  bool qk_norm = false;
  bool lse = false;
  BiasShape bias = BiasShape::kAbsent;
  bool bias_masks = false;  // some entries of the bias are -inf
  SlotStyle slots = SlotStyle::kAbsent;
  Positions positions = Positions::kAbsent;
  Metadata metadata = Metadata::kAbsent;

  // storage
  TableStyle table = TableStyle::kShuffled;
  BelowWindow below_window = BelowWindow::kUnmapped;
  std::int64_t unmapped_holes = 0;  // this many blocks of a sequence's past are -1
  CacheOrder cache_order = CacheOrder::kTokenMajor;
  bool hostile = true;  // unread memory holds NaN and wild ids; false: zeros and -1

  // magnitudes of the values
  double query_magnitude = 1.0;
  double key_magnitude = 1.0;
  double value_magnitude = 1.0;
  double sink_low = -2.0, sink_high = 6.0;

  std::int64_t batch_size() const { return static_cast<std::int64_t>(past.size()); }
  std::int64_t kv_length(std::int64_t sequence) const {
    return past[static_cast<std::size_t>(sequence)] + added[static_cast<std::size_t>(sequence)];
  }
  std::int64_t identity(std::int64_t sequence) const {
    return identities.empty() ? sequence : identities[static_cast<std::size_t>(sequence)];
  }
  std::int64_t new_tokens() const;
  std::int64_t token_count() const { return new_tokens() + padding_tokens; }
  std::int64_t output_width() const { return latent && v_head_size != 0 ? v_head_size : head_size; }
  std::int64_t rotary_width() const;  // 0 without RoPE
  CacheType k_format() const;         // resolved: never kTensorType
  CacheType v_format() const;         // k_format() when latent
  QuantType v_granularity() const { return latent ? k_quant : v_quant; }
  std::int64_t position_limit() const;  // one past the largest position of any token
};

// Everything that differs from a default Case, in one line: "head_size=64 past=[0,3] softcap=5 ...".
std::string to_string(const Case& c);

// How GoogleTest prints a Case.
void PrintTo(const Case& c, std::ostream* out);

// Gives K and V of `c` this cache format, with a scale of this granularity where the format needs one.
Case with_cache(Case c, CacheType k, QuantType k_quant, CacheType v, QuantType v_quant);

}  // namespace octavo::testing
