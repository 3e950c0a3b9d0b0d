// The verdict on one run of a backend: caches, outputs, untouched memory.
#pragma once

#include <string>
#include <vector>

#include "reference/reference.h"
#include "support/call.h"

namespace octavo::testing {

struct Report {
  std::vector<std::string> failures;  // the first of each kind, with index, value, expectation and bound
  double worst = 0.0;                 // largest error of a float32 number in units of its bound (1 = at the bound)

  bool ok() const { return failures.empty(); }
  std::string text() const;
};

// What cpu_avx512_vnni may round: 24 bits of fixed point (docs/decisions/0011-integer-products-on-vnni.md) for Q where
// K is int8 or int4, and for the weights where V is. The other CPU backends have float32 arithmetic and nothing else.
Arithmetic vnni_arithmetic(const Call& call);

// Compares what a run left in `call`, whose tensors held `before`, with the oracle:
// - every byte of the caches outside the written rows, and of every input, is what it was; guards are intact;
// - a written code is the oracle's, or its neighbour where float32 arithmetic may land on the other side of the
// boundary;
// - outputs are within the error of float32 arithmetic (reference.h) plus half a unit of the output's type;
// - rows that attend to nothing are exactly 0 with an LSE of exactly -inf.
// Where the oracle gives NaN (a NaN in the sequence's own tokens), anything is right.
// `arithmetic` widens the bounds of outputs by what the backend rounds besides float32 arithmetic.
Report compare(Call& call, const Call::Snapshot& before, const Arithmetic& arithmetic);

// ... for any backend of the CPU.
Report compare(Call& call, const Call::Snapshot& before);

// Equal bits in every tensor that `names` lists; empty or "output[3] differs: ...".
std::string first_difference(Call& a, Call& b, const std::vector<std::string>& names);

}  // namespace octavo::testing
