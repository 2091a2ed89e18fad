#include "dispatch/shape_memo.h"

#include <algorithm>
#include <cstring>

#include "common/options.h"

namespace lazyxla::dispatch {

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

}  // namespace lazyxla::dispatch
