// Counter-based random numbers: a value is a function of a seed and coordinates, so a token has the same query, key and
// value whether it comes alone, in a batch, whole or in chunks.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>

namespace octavo::testing {

inline std::uint64_t mix(std::uint64_t x) {  // splitmix64's finaliser
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

inline std::uint64_t hash(std::uint64_t seed, std::initializer_list<std::int64_t> coordinates) {
  for (const std::int64_t c : coordinates) seed = mix(seed ^ static_cast<std::uint64_t>(c));
  return mix(seed);
}

// In [0, 1).
inline double unit(std::uint64_t bits) {
  return static_cast<double>(bits >> 11) * 0x1.0p-53;
}

// About normal, mean 0 and variance 1, within [-3.5, 3.5]: the sum of four uniform 16-bit numbers.
inline double normal(std::uint64_t bits) {
  double sum = 0.0;
  for (int i = 0; i < 4; ++i) sum += static_cast<double>((bits >> (16 * i)) & 0xFFFFu) / 65535.0 - 0.5;
  return sum * std::sqrt(3.0);
}

// A sequence of draws for generators that need no coordinates.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(mix(seed)) {}
  std::uint64_t next() { return state_ = mix(state_); }
  std::int64_t below(std::int64_t bound) {
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(bound));
  }
  std::int64_t between(std::int64_t low, std::int64_t high) { return low + below(high - low + 1); }
  bool chance(double probability) { return unit(next()) < probability; }
  template <typename T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[below(static_cast<std::int64_t>(choices.size()))];
  }

 private:
  std::uint64_t state_;
};

}  // namespace octavo::testing
