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
  const auto entries = entries_.hold();
  Entry* found = entries->find(key);
  return found ? found->recipe : nullptr;
}

RecipeRef ShapeMemo::insert(const MemoKey& key, RecipeRef recipe) {
  std::vector<Entry> dropped;  // dies without the lock
  Entry entry{{key.words, key.words + key.size}, std::move(recipe)};
  const MemoKey own{entry.key.data(), key.size, key.hash};
  const auto capacity = static_cast<size_t>(options().max_calls.load());
  const auto entries = entries_.hold();
  if (Entry* found = entries->find(key)) return found->recipe;
  return entries->insert(own, std::move(entry), capacity, dropped).recipe;
}

size_t ShapeMemo::size() { return entries_.hold()->size(); }

}  // namespace lazyxla::dispatch
