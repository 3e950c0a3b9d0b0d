// The oracle: com.microsoft::PagedAttention in plain loops of double, from docs/contract.md and from nothing under
// src/.
//
// It works in two halves, so that a backend can be judged fairly. The prologue says which numbers go to which slots. A
// backend computes those in float32, so a stored code may legitimately be the neighbour of the oracle's when the number
// lies on a rounding boundary (compare.h checks that it does). Attention is then computed by the oracle from the caches
// that the backend left, so that such a neighbour is not counted again, magnified, as an error of the output.
//
// Next to each number stands a bound of the error that float32 arithmetic makes on the way to it, in the same units.
// Rounding to the type of the output comes on top (compare.h).
#pragma once

#include <cstdint>
#include <vector>

#include "octavo/paged_attention.h"

namespace octavo::testing {

// Mistakes that implementations have made. The oracle makes them on request, to prove that the comparison finds them.
enum class Deviation : std::uint8_t {
  kNone,
  kBiasBeforeSoftcap,    // softcap of -inf is -softcap: masked columns leak
  kUnmappedReadsAsZero,  // an unmapped position has score 0 instead of none
  kNewestKeyMissing,     // the causal mask excludes the token itself
  kSinkInWeightedSum,    // the sink weighs the newest V row
  kValueFromTrailing,    // LATENT: V from the trailing channels
  kSinglePrecision,      // no mistake: the same loops in float32, to calibrate the bounds
};

// What a backend rounds besides float32 arithmetic: tensor cores take Q and the weights of V in a 16-bit type, integer
// products in fixed point.
struct Arithmetic {
  double query_roundoff = 0.0;   // of each element of Q as it meets K, relative
  double query_floor = 0.0;      // ... and in units of the row's largest |Q|, K's scales in it
  double weight_roundoff = 0.0;  // of each weight as it meets V, relative
  double weight_floor = 0.0;     // ... and in units of the row's largest weight
};

struct Prologue {
  std::vector<double> query, query_error;  // (token_count, num_heads, head_size), normalised and rotated
  std::vector<double> key, key_error;  // (token_count, kv_num_heads, head_size), what the cache is to hold, dequantised
  std::vector<double> value;           // (token_count, kv_num_heads, head_size); empty in LATENT
  std::vector<std::int64_t> slot;      // per token; -1: nothing stays of it (unset, padding, or a later token's slot)
};

struct Expected {
  std::vector<double> output, output_error;        // (token_count, num_heads, v_head_size)
  std::vector<double> output_qk, output_qk_error;  // as Arguments::output_qk; empty without
  std::vector<double> lse, lse_error;              // (num_heads, token_count)
};

Prologue reference_prologue(const Arguments& arguments, const Attributes& attributes);

// Writes the prologue's K and V into the caches of `arguments`, rounded once.
void reference_store(const Prologue& prologue, const Arguments& arguments, const Attributes& attributes);

// Attention over the caches as they are.
Expected reference_attention(const Prologue& prologue, const Arguments& arguments, const Attributes& attributes,
                             Deviation deviation = Deviation::kNone, const Arithmetic& arithmetic = {});

// The oracle as a backend: prologue, store, attention, outputs rounded to their types.
void reference_run(const Arguments& arguments, const Attributes& attributes, Deviation deviation = Deviation::kNone);

// The formats of the caches. In LATENT V is K.
CacheType k_cache_format(const Arguments& arguments, const Attributes& attributes);
CacheType v_cache_format(const Arguments& arguments, const Attributes& attributes);

// The first byte of a cache row: slot = block * block_size + offset.
std::byte* cache_row(const MutableTensorView& cache, std::int64_t slot, std::int64_t head);

// k_scale or v_scale of one channel; 1 where there is none.
double scale_of(const TensorView& scale, std::int64_t head, std::int64_t channel);

}  // namespace octavo::testing
