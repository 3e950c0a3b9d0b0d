// Rules Z: the tensors that give the sizes: query, key_cache, cumulative_sequence_length, block_table, cos_cache and
// attention_bias.
#include <limits>

#include "contract/message.h"
#include "contract/rules.h"
#include "contract/tensors.h"

namespace octavo::contract {
namespace {

constexpr std::int64_t kMaxTokens = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kMaxCapacity = std::int64_t{1} << 40;
constexpr std::int64_t kMaxHeadSize = 512;
constexpr std::int64_t kMaxLatentHeadSize = 1024;

bool is_latent(const Call& call) {
  return call.attributes.kv_cache_layout == CacheLayout::kLatent;
}
bool is_packed(const Call& call) {
  return !is_latent(call) && !call.arguments.key.present();
}

// Heads that lie side by side in a row of query.
std::int64_t query_row_heads(const Call& call) {
  return call.attributes.num_heads + (is_packed(call) ? 2 * call.attributes.kv_num_heads : 0);
}

std::int64_t head_size(const Call& call) {
  return call.arguments.query.shape[1] / query_row_heads(call);
}

std::string rank_is(TensorId id, const TensorView& view, int rank) {
  if (!view.present() || view.rank == rank) return {};
  return cat(tensor(id).name, ": rank must be ", rank, ", got rank ", view.rank, " of shape ", shape_text(view),
             "; its shape is ", tensor(id).dimensions);
}

std::string query_rank(const Call& call) {
  return rank_is(TensorId::kQuery, call.arguments.query, 2);
}

std::string token_count(const Call& call) {
  if (call.arguments.query.shape[0] <= kMaxTokens) return {};
  return cat("query: at most ", kMaxTokens, " tokens, because cumulative_sequence_length is int32, got ",
             call.arguments.query.shape[0], "; split the call");
}

std::string query_width(const Call& call) {
  const std::int64_t width = call.arguments.query.shape[1];
  if (width % query_row_heads(call) == 0) return {};
  if (is_packed(call)) {
    return cat(
        "query: packed Q, K and V (key and value are absent) must be a multiple of num_heads + 2*kv_num_heads = ",
        query_row_heads(call), " wide, got shape ", shape_text(call.arguments.query),
        "; pass (token_count, (num_heads + 2*kv_num_heads)*head_size), or key and value");
  }
  return cat("query: must be a multiple of num_heads = ", query_row_heads(call), " wide, got shape ",
             shape_text(call.arguments.query), "; pass (token_count, num_heads*head_size)");
}

std::string head_size_range(const Call& call) {
  const std::int64_t size = head_size(call);
  const std::int64_t limit = is_latent(call) ? kMaxLatentHeadSize : kMaxHeadSize;
  if (size >= 8 && size <= limit && size % 8 == 0) return {};
  return cat("query: head_size must be a multiple of 8, 8 to ", limit, " in ", name(call.attributes.kv_cache_layout),
             ", got ", size, " (", call.arguments.query.shape[1], " channels over ", query_row_heads(call),
             " heads); check num_heads and query's shape");
}

std::string v_head_size_range(const Call& call) {
  const std::int64_t size = call.attributes.v_head_size;
  if (size == 0 || size == head_size(call) || (is_latent(call) && size < head_size(call))) return {};
  return cat("v_head_size: must be 0 or ",
             is_latent(call) ? "at most head_size = " : "head_size in SEPARATE, where head_size = ", head_size(call),
             ", got ", size,
             is_latent(call) ? "; V is the leading part of a latent row" : "; only LATENT has a narrower V");
}

std::string v_head_size_needs_scale(const Call& call) {
  const std::int64_t size = call.attributes.v_head_size;
  if (size == 0 || size == head_size(call) || call.attributes.scale != 0) return {};
  return cat("scale: must be given when v_head_size differs from head_size, got none with v_head_size = ", size,
             " and head_size = ", head_size(call),
             "; an absorbed model scales by its width before absorption, which cannot be seen here");
}

std::string key_cache_rank(const Call& call) {
  return rank_is(TensorId::kKeyCache, call.arguments.key_cache, 4);
}

std::string block_size(const Call& call) {
  if (call.arguments.key_cache.shape[1] >= 1) return {};
  return cat("key_cache: block_size must be at least 1, got shape ", shape_text(call.arguments.key_cache),
             "; pass (num_blocks, block_size, kv_num_heads, head_size)");
}

std::string cumulative_length_shape(const Call& call) {
  const TensorView& offsets = call.arguments.cumulative_sequence_length;
  if (std::string text = rank_is(TensorId::kCumulativeSequenceLength, offsets, 1); !text.empty()) return text;
  if (offsets.shape[0] >= 1) return {};
  return "cumulative_sequence_length: must have batch_size + 1 elements, got shape (0); pass (0) as its only value for "
         "an empty batch";
}

std::string block_table_rank(const Call& call) {
  return rank_is(TensorId::kBlockTable, call.arguments.block_table, 2);
}

std::string capacity(const Call& call) {
  const std::int64_t columns = call.arguments.block_table.shape[1];
  const std::int64_t block = call.arguments.key_cache.shape[1];
  std::int64_t positions = 0;
  if (!__builtin_mul_overflow(columns, block, &positions) && positions <= kMaxCapacity) return {};
  return cat("block_table: max_blocks_per_sequence * block_size must be at most 2^40 positions, got ", columns, " * ",
             block, "; check block_table's and key_cache's shapes");
}

std::string rotary_rank(const Call& call) {
  if (call.attributes.do_rotary == 0) return {};
  return rank_is(TensorId::kCosCache, call.arguments.cos_cache, 2);
}

std::string rotary_channels(const Call& call) {
  if (call.attributes.do_rotary == 0) return {};
  const std::int64_t half = call.arguments.cos_cache.shape[1];
  const std::int64_t offset = call.attributes.rotary_offset;
  const std::int64_t size = head_size(call);
  // Divided, so that neither a huge extent nor a huge offset can overflow.
  if (half >= 1 && offset < size && half <= (size - offset) / 2) return {};
  return cat("cos_cache: rotary_offset + rotary_dim must be within head_size = ", size,
             " and rotary_dim/2 at least 1, got rotary_offset = ", offset, " and shape ",
             shape_text(call.arguments.cos_cache), "; pass (max_seq_len, rotary_dim/2)");
}

std::string bias_rank(const Call& call) {
  return rank_is(TensorId::kAttentionBias, call.arguments.attention_bias, 4);
}

constexpr Rule kRules[] = {
    {"Z1", "query has rank 2.", query_rank},
    {"Z2", "query has at most 2^31 - 1 tokens.", token_count},
    {"Z3", "The width of query is a multiple of num_heads, or of num_heads + 2*kv_num_heads when packed.", query_width},
    {"Z4", "head_size is a multiple of 8, from 8 to 512 in SEPARATE and to 1024 in LATENT.", head_size_range},
    {"Z5", "v_head_size is 0 or head_size; in LATENT also anything between.", v_head_size_range},
    {"Z6", "scale is given when v_head_size differs from head_size.", v_head_size_needs_scale},
    {"Z7", "key_cache has rank 4.", key_cache_rank},
    {"Z8", "block_size is at least 1.", block_size},
    {"Z9", "cumulative_sequence_length has rank 1 and at least one element.", cumulative_length_shape},
    {"Z10", "block_table has rank 2.", block_table_rank},
    {"Z11", "max_blocks_per_sequence * block_size is at most 2^40.", capacity},
    {"Z12", "With do_rotary = 1, cos_cache has rank 2.", rotary_rank},
    {"Z13",
     "With do_rotary = 1, the channels rotary_offset to rotary_offset + rotary_dim lie inside a head, and "
     "rotary_dim is at least 2.",
     rotary_channels},
    {"Z14", "attention_bias has rank 4.", bias_rank},
};

}  // namespace

std::span<const Rule> size_rules() noexcept {
  return kRules;
}

}  // namespace octavo::contract
