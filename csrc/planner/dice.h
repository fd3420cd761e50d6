// Random numbers equal to those of core/search/dice.py: splitmix64 (Steele, Lea and Flood 2014).
#pragma once

#include <cstdint>

namespace zb {

class Dice {
 public:
  explicit Dice(uint64_t seed) : state(seed) {}

  double uniform() { return static_cast<double>(roll() >> 11) * 0x1.0p-53; }

  int below(int n) { return static_cast<int>(roll() % static_cast<uint64_t>(n)); }

 private:
  uint64_t roll() {
    state += 0x9E3779B97F4A7C15ull;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }

  uint64_t state;
};

}  // namespace zb
