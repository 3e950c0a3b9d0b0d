// Rows of K and V in shared memory: where their pieces stand, how they get there, how operands are read.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "cuda/decode/shape.h"
#include "cuda/device/tensor_core.cuh"

namespace octavo::cuda::decode {

// 16 bytes that are read once: they need not stay in L2.
__device__ inline void copy_once(std::uint32_t to, const void* from, bool valid, std::uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0), "l"(policy)
               : "memory");
}

__device__ inline std::uint64_t read_once_policy() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ inline void load_words(std::uint32_t (&x)[4], std::uint32_t address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}
__device__ inline void load_words(std::uint32_t (&x)[2], std::uint32_t address) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(address) : "memory");
}

__device__ inline void store_word(std::uint32_t address, std::uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// Where 16-byte piece `piece` of a key's row stands in a slot: in panels of 128 bytes a key, pieces permuted by the key
// (the copy engine's swizzle of 128 bytes; slots start at multiples of 1,024).
template <int kKeys>
__device__ constexpr int slot_offset(int key, int piece) {
  return piece / 8 * kKeys * kPanelBytes + key * kPanelBytes + ((piece % 8) ^ (key % 8)) * 16;
}

// Rows of a tensor-core tile are keys in this order in every eight: any two and any four rows in a row then stand in
// different banks, whatever piece is read (bits reversed).
__device__ constexpr int key_of_row(int row) {
  return (row & ~5) | (row & 1) << 2 | (row >> 2 & 1);
}

// body(0), ..., body(kCount - 1) with constants.
template <int kCount, typename Body>
__device__ inline void unrolled(Body&& body) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
    (body(std::integral_constant<int, kIndex>{}), ...);
  }
  (std::make_integer_sequence<int, kCount>{});
}

// The address of (key ^ kKey, piece ^ kPiece) from that of (key, piece): the bits of keys and pieces only ever meet by
// exclusive or, and bits above are not both in the lane's own key and in kKey (a multiple of eight).
template <int kKeys, int kKey, int kPiece>
__device__ inline std::uint32_t moved(std::uint32_t address) {
  constexpr std::uint32_t kChange = slot_offset<kKeys>(kKey, kPiece);
  return (address ^ (kChange & 0x70u)) + (kChange & ~0x7fu);
}

}  // namespace octavo::cuda::decode
