#include "dispatch/shape_memo.h"

#include <algorithm>
#include <cstring>

#include "common/options.h"

namespace lazyxla::ir {

uint64_t hash_words(const uint64_t* words, size_t n) {
  // Multiply and fold, two lanes. Keys are compared in full on a hit, so speed is what counts.
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

bool ShapeMemo::Equal::operator()(const MemoKey& a, const MemoKey& b) const {
  return a.size == b.size && std::memcmp(a.words, b.words, a.size * sizeof(uint64_t)) == 0;
}

ShapeMemo& ShapeMemo::get() {
  static auto* instance = new ShapeMemo();
  return *instance;
}

RecipeRef ShapeMemo::find(const MemoKey& key) {
  std::lock_guard lock(mutex_);
  Entry* found = entries_.find(key);
  return found ? found->recipe : nullptr;
}

RecipeRef ShapeMemo::insert(const MemoKey& key, RecipeRef recipe) {
  std::vector<Entry> dropped;  // dies without the lock
  Entry entry{{key.words, key.words + key.size}, std::move(recipe)};
  const MemoKey own{entry.key.data(), key.size, key.hash};
  const auto capacity = static_cast<size_t>(options().max_calls.load());
  std::lock_guard lock(mutex_);
  if (Entry* found = entries_.find(key)) return found->recipe;
  return entries_.insert(own, std::move(entry), capacity, dropped).recipe;
}

size_t ShapeMemo::size() {
  std::lock_guard lock(mutex_);
  return entries_.size();
}

}  // namespace lazyxla::ir
