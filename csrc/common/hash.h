// A 64-bit hash of a run of words, for keys that are compared in full on a hit.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lazyxla {

inline uint64_t hash_words(const uint64_t* words, size_t n) {
  // Multiply and fold, two lanes: speed is what counts.
  uint64_t a = 0x9e3779b97f4a7c15ull ^ n, b = 0xc2b2ae3d27d4eb4full;
  auto mix = [](uint64_t h, uint64_t w) {
    __uint128_t product = static_cast<__uint128_t>(h ^ w) * 0xd6e8feb86659fd93ull;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  };
  size_t i = 0;
  for (; i + 1 < n; i += 2) {
    a = mix(a, words[i]);
    b = mix(b, words[i + 1]);
  }
  if (i < n) a = mix(a, words[i]);
  return mix(a, b);
}

}  // namespace lazyxla
