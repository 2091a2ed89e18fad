// A map that forgets: when it is full, the least recently used quarter is dropped.
//
// For records of a program's past, which may be endless: a loop over ever new shapes. Not
// thread-safe.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace lazyxla {

template <typename Key, typename T, typename Hash = std::hash<Key>,
          typename Equal = std::equal_to<Key>>
class BoundedMap {
 public:
  // Null if there is none. Valid until the next insertion.
  T* find(const Key& key) {
    auto found = entries_.find(key);
    if (found == entries_.end()) return nullptr;
    found->second.last_use = insertions_;
    return &found->second.value;
  }

  // Adds a missing key. Entries that had to make room are appended to `dropped`.
  T& insert(const Key& key, T value, size_t capacity, std::vector<T>& dropped) {
    if (entries_.size() >= capacity) drop_oldest(std::max<size_t>(capacity, 1), dropped);
    return entries_.emplace(key, Entry{std::move(value), ++insertions_}).first->second.value;
  }
  T& insert(const Key& key, T value, size_t capacity) {
    std::vector<T> dropped;
    return insert(key, std::move(value), capacity, dropped);
  }

  size_t size() const { return entries_.size(); }
  void clear() { entries_.clear(); }

 private:
  struct Entry {
    T value;
    uint64_t last_use;  // in insertions
  };

  void drop_oldest(size_t capacity, std::vector<T>& dropped) {
    std::vector<uint64_t> uses;
    for (const auto& [key, entry] : entries_) uses.push_back(entry.last_use);
    // A quarter of the capacity, and the excess if the capacity was lowered.
    const size_t count = std::min(uses.size(), uses.size() - capacity + capacity / 4 + 1);
    const auto last = uses.begin() + static_cast<std::ptrdiff_t>(count - 1);
    std::nth_element(uses.begin(), last, uses.end());
    size_t left = count;  // many may have been used at the same time
    for (auto each = entries_.begin(); each != entries_.end();) {
      if (left == 0 || each->second.last_use > *last) {
        ++each;
        continue;
      }
      --left;
      dropped.push_back(std::move(each->second.value));
      each = entries_.erase(each);
    }
  }

  ska::flat_hash_map<Key, Entry, Hash, Equal> entries_;
  uint64_t insertions_ = 0;
};

}  // namespace lazyxla
