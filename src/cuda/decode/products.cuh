// The products of a step: K Q^T and V^T P^T, on operands that stand in a slot as the cache holds them.
#pragma once

#include <cstdint>

#include "cuda/decode/formats.cuh"
#include "cuda/decode/shape.h"
#include "cuda/decode/shared_rows.cuh"

namespace octavo::cuda::decode {

template <typename S>
struct Products {
  static constexpr CacheType kType = S::kType;
  static constexpr int kHead = S::kHead;
  using C = Compute<kType>;
  static constexpr int kKeyTiles = S::kKeys / 16;
  static constexpr int kRowTiles = S::kTiles;
  static constexpr int kChannelTiles = kHead / 16;
  static constexpr int kHeadPieces = S::kHeadBytes / 16;  // of a head's row
  static constexpr bool kWide = S::kWide;
  static constexpr bool kShortRows = S::kHeadBytes < 64;  // four lanes read 32 bytes of a key, not 64

  // Where in a slot a lane reads its operands of K and of V, for the warp's head and keys.
  static __device__ int key_operand(int head, int first_key, int lane) {
    const int piece = head * kHeadPieces;
    if constexpr (kWide) return place(first_key + (lane / 8 & 1) * 8 + key_of_row(lane % 8), piece + lane / 16);
    if constexpr (kShortRows) return place(first_key + key_of_row(lane / 4), piece + lane % 4 / 2) + lane % 2 * 8;
    return place(first_key + key_of_row(lane / 4), piece + lane % 4);
  }
  static __device__ int value_operand(int head, int first_key, int lane) {
    const int piece = head * kHeadPieces;
    if constexpr (kWide) return place(first_key + lane / 16 * 8 + key_of_row(lane % 8), piece + (lane / 8 & 1));
    return place(first_key + key_of_row(lane % 8) + lane / 8 % 2 * 8, piece + lane / 16);
  }

  // With shared weights a warp has these channels of its head, as pieces of V's rows: 16 channels of codes of 8 bits,
  // 32 of 4, 8 channels of 16.
  static constexpr int kOwnPieces = kHeadPieces / S::kGroups;
  static constexpr int kOwnTiles = kChannelTiles / S::kGroups;
  static __device__ int own_value_operand(int head, int group, int lane) {
    const int piece = head * kHeadPieces + group * kOwnPieces;
    if constexpr (kWide) return place(lane / 16 * 8 + key_of_row(lane % 8), piece + (lane / 8 & 1));
    return place(lane / 8 * 8 + key_of_row(lane % 8), piece);
  }
  // Where among the weights of a head a lane stores those of its keys, and where it reads fragments.
  static __device__ int weight_to(int first_key, int lane) {
    return first_key / 8 * kRowTiles * 128 + lane / 4 * 16 + lane % 4 * 4;
  }
  static __device__ int weight_from(int lane) { return (lane / 8 % 2 * kRowTiles + lane / 16) * 128 + lane % 8 * 16; }

  // s = the keys of a slot times Q, plus the row's bias. `from`: this lane's place in the slot; `query(step, tile,
  // register)`: Q's fragments. Returns a word of the last load.
  template <typename Query>
  static __device__ std::uint32_t multiply_keys(std::uint32_t from, const Query& query,
                                                const float (&bias)[kRowTiles][2],
                                                float (&s)[kKeyTiles][kRowTiles][4]) {
    std::uint32_t last = 0;
#pragma unroll
    for (int k = 0; k < kKeyTiles; ++k) {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[k][tile][i] = kCodeBias<kType> != 0 ? bias[tile][i % 2] : 0.0f;
      }
    }
    const auto multiply = [&](int step, int k, const std::uint32_t(&a)[4]) {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        multiply_add<C>(s[k][tile], a, query(step, tile, 0), query(step, tile, 1));
      }
    };
    if constexpr (kWide) {
      constexpr int kAtOnce = 4;  // fragments that are read before the first of them is used
      unrolled<S::kSteps * kKeyTiles / kAtOnce>([&](auto group) {
        std::uint32_t a[kAtOnce][4];
        unrolled<kAtOnce>([&](auto i) {
          constexpr int kIndex = group.value * kAtOnce + i.value;
          load_matrices(a[i.value], moved<S::kTileKeys, kIndex % kKeyTiles * 16, kIndex / kKeyTiles * 2>(from));
        });
        unrolled<kAtOnce>([&](auto i) {
          constexpr int kIndex = group.value * kAtOnce + i.value;
          multiply(kIndex / kKeyTiles, kIndex % kKeyTiles, a[i.value]);
        });
        last = a[kAtOnce - 1][0];
      });
    } else {
      // A lane's words of two keys at a time: 16 bytes of each, or 8 where rows are short.
      constexpr int kWords = kShortRows ? 2 : 4;
      constexpr int kReads = kShortRows ? 1 : S::kHeadBytes / 64;  // of a head's row
      constexpr int kAllReads = kReads * kKeyTiles;
      constexpr int kAtOnce = kAllReads < 2 ? 1 : 2;
      unrolled<kAllReads / kAtOnce>([&](auto group) {
        std::uint32_t lows[kAtOnce][kWords], highs[kAtOnce][kWords];
        unrolled<kAtOnce>([&](auto i) {
          constexpr int kRead = group.value * kAtOnce + i.value;
          constexpr int kKey = kRead % kKeyTiles * 16;
          constexpr int kPiece = kRead / kKeyTiles * kWords;  // four lanes share kWords pieces
          load_words(lows[i.value], moved<S::kTileKeys, kKey, kPiece>(from));
          load_words(highs[i.value], moved<S::kTileKeys, kKey + 8, kPiece>(from));
        });
        unrolled<kAtOnce>([&](auto i) {
          constexpr int kRead = group.value * kAtOnce + i.value;
          constexpr int kTile = kRead % kKeyTiles;
          constexpr int kFirstStep = kRead / kKeyTiles * (S::kSteps / kReads);
#pragma unroll
          for (int word = 0; word < kWords; ++word) {
            if constexpr (kType == CacheType::kInt4) {
              std::uint32_t x[4], y[4];
              widen_int4_key(lows[i.value][word], x);
              widen_int4_key(highs[i.value][word], y);
              multiply(kFirstStep + word * 2, kTile, {x[0], y[0], x[1], y[1]});
              multiply(kFirstStep + word * 2 + 1, kTile, {x[2], y[2], x[3], y[3]});
            } else {
              std::uint32_t x[2], y[2];
              widen_key<kType>(lows[i.value][word], x);
              widen_key<kType>(highs[i.value][word], y);
              multiply(kFirstStep + word, kTile, {x[0], y[0], x[1], y[1]});
            }
          }
        });
        last = highs[kAtOnce - 1][0];
      });
    }
    return last;
  }

  // Which of a lane's values belong to keys whose bit in `live` is set, as halves of a register: of each key tile the
  // first eight keys and the others.
  template <int kCount>
  static __device__ void find_live(std::uint32_t live, int lane, std::uint32_t (&mask)[kCount][2]) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t keys = live >> (k * 16 + half * 8);
        mask[k][half] = (keys >> key_of_row(lane % 4 * 2) & 1u) * 0xffffu |
                        (keys >> key_of_row(lane % 4 * 2 + 1) & 1u) * 0xffff0000u;
      }
    }
  }

  // Weights of this lane's keys, as words of two rows, to where all warps of the head read them.
  static __device__ void share_weights(std::uint32_t to, const std::uint32_t (&p)[kKeyTiles][kRowTiles][2]) {
#pragma unroll
    for (int k = 0; k < kKeyTiles; ++k) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          store_word(to + ((k * 2 + half) * kRowTiles + tile) * 128, p[k][tile][half]);
        }
      }
    }
  }

  // sums += the values of all keys of a slot, of this warp's channels, times the weights that stand at `weights`. If
  // kMasked, values that `live(word)` (a bit a key, 32 keys a word) does not have count as zeros. Returns a word of the
  // last load.
  template <bool kMasked, typename Live>
  static __device__ std::uint32_t multiply_own_values(std::uint32_t from, std::uint32_t weights, int lane,
                                                      const Live& live,
                                                      float (&sums)[S::kSharesWeights ? kOwnTiles : 1][kRowTiles][4]) {
    std::uint32_t last = 0;
    unrolled<S::kTileKeys / 32>([&](auto word) {
      // Fragments of the weights of two key tiles: for each row tile, the first eight keys and the others.
      std::uint32_t p[2][kRowTiles][2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int tile = 0; tile < kRowTiles; tile += 2) {
          std::uint32_t x[4];
          load_matrices_transposed(x, weights + ((word.value * 2 + k) * 2 * kRowTiles + tile) * 128);
          p[k][tile][0] = x[0];
          p[k][tile][1] = x[1];
          p[k][tile + 1][0] = x[2];
          p[k][tile + 1][1] = x[3];
        }
      }
      [[maybe_unused]] std::uint32_t mask[2][2];
      if constexpr (kMasked) find_live(live(word.value), lane, mask);
      const auto multiply = [&](int channel_tile, int k, std::uint32_t(&a)[4]) {
        if constexpr (kMasked) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] &= mask[k][i / 2];
        }
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          multiply_add<C>(sums[channel_tile][tile], a, p[k][tile][0], p[k][tile][1]);
        }
      };
      if constexpr (kWide) {
        unrolled<kOwnTiles>([&](auto tile) {
          std::uint32_t a[2][4];
          unrolled<2>([&](auto k) {
            load_matrices_transposed(a[k.value],
                                     moved<S::kTileKeys, word.value * 32 + k.value * 16, tile.value * 2>(from));
          });
#pragma unroll
          for (int k = 0; k < 2; ++k) multiply(tile.value, k, a[k]);
          last = a[1][0];
        });
      } else {
        unrolled<kOwnPieces>([&](auto piece) {
          std::uint32_t words[4];  // eight keys each
          load_matrices_transposed(words, moved<S::kTileKeys, word.value * 32, piece.value>(from));
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            if constexpr (kType == CacheType::kInt4) {
              std::uint32_t x[4], y[4];
              widen_int4(words[k * 2], x);
              widen_int4(words[k * 2 + 1], y);
              std::uint32_t a[4] = {x[0], x[1], y[0], y[1]};
              std::uint32_t b[4] = {x[2], x[3], y[2], y[3]};
              multiply(piece.value * 2, k, a);
              multiply(piece.value * 2 + 1, k, b);
            } else {
              std::uint32_t a[4];
              widen_value<kType>(words[k * 2], a[0], a[1]);
              widen_value<kType>(words[k * 2 + 1], a[2], a[3]);
              multiply(piece.value, k, a);
            }
          }
          last = words[3];
        });
      }
    });
    return last;
  }

  // sums += the values of a slot times the weights p. If kMasked, values that `live` does not have count as zeros,
  // whatever stands there. Returns a word of the last load.
  template <bool kMasked>
  static __device__ std::uint32_t multiply_values(std::uint32_t from, const std::uint32_t (&p)[kKeyTiles][kRowTiles][2],
                                                  const std::uint32_t (&live)[kKeyTiles][2],
                                                  float (&sums)[kChannelTiles][kRowTiles][4]) {
    std::uint32_t last = 0;
    const auto multiply = [&](int channel_tile, int k, std::uint32_t(&a)[4]) {
      if constexpr (kMasked) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] &= live[k][i / 2];
      }
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        multiply_add<C>(sums[channel_tile][tile], a, p[k][tile][0], p[k][tile][1]);
      }
    };
    if constexpr (kWide) {
      constexpr int kAtOnce = 4;
      unrolled<kChannelTiles * kKeyTiles / kAtOnce>([&](auto group) {
        std::uint32_t a[kAtOnce][4];
        unrolled<kAtOnce>([&](auto i) {
          constexpr int kIndex = group.value * kAtOnce + i.value;
          load_matrices_transposed(a[i.value],
                                   moved<S::kTileKeys, kIndex % kKeyTiles * 16, kIndex / kKeyTiles * 2>(from));
        });
        unrolled<kAtOnce>([&](auto i) {
          constexpr int kIndex = group.value * kAtOnce + i.value;
          multiply(kIndex / kKeyTiles, kIndex % kKeyTiles, a[i.value]);
        });
        last = a[kAtOnce - 1][0];
      });
    } else {
      // Four matrices of eight keys each: 16 keys of two 16-byte pieces.
      constexpr int kPairs = kHeadPieces / 2;
      constexpr int kAtOnce = kPairs < 4 ? kPairs : 4;
      unrolled<kKeyTiles * kPairs / kAtOnce>([&](auto group) {
        constexpr int kTile = group.value % kKeyTiles;
        constexpr int kFirst = group.value / kKeyTiles * kAtOnce * 2;
        std::uint32_t words[kAtOnce][4];
        unrolled<kAtOnce>([&](auto i) {
          load_matrices_transposed(words[i.value], moved<S::kTileKeys, kTile * 16, kFirst + i.value * 2>(from));
        });
        unrolled<2 * kAtOnce>([&](auto i) {
          constexpr int kPiece = kFirst + i.value;
          const std::uint32_t low = words[i.value / 2][i.value % 2 * 2];
          const std::uint32_t high = words[i.value / 2][i.value % 2 * 2 + 1];
          if constexpr (kType == CacheType::kInt4) {
            std::uint32_t x[4], y[4];
            widen_int4(low, x);
            widen_int4(high, y);
            std::uint32_t a[4] = {x[0], x[1], y[0], y[1]};
            std::uint32_t b[4] = {x[2], x[3], y[2], y[3]};
            multiply(kPiece * 2, kTile, a);
            multiply(kPiece * 2 + 1, kTile, b);
          } else {
            std::uint32_t a[4];
            widen_value<kType>(low, a[0], a[1]);
            widen_value<kType>(high, a[2], a[3]);
            multiply(kPiece, kTile, a);
          }
        });
        last = words[kAtOnce - 1][0];
      });
    }
    return last;
  }

 private:
  static __device__ int place(int key, int piece) {
    return slot_offset<S::kTileKeys>(key, piece);
  }
};

}  // namespace octavo::cuda::decode
