// Kinds of calls that were checked once and found right, by their hashes: only the hash is kept;
// that two calls have the same hash is too unlikely to matter.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <mutex>

#include "common/spin_lock.h"

namespace lazyxla::dispatch {

class KnownCalls {
 public:
  bool contains(uint64_t hash) {
    std::lock_guard lock(mutex_);
    return hashes_.count(hash) > 0;
  }
  void add(uint64_t hash) {
    std::lock_guard lock(mutex_);
    if (hashes_.size() >= kMost) hashes_.clear();
    hashes_.insert(hash);
  }

 private:
  static constexpr size_t kMost = 1 << 14;
  SpinLock mutex_;
  ska::flat_hash_set<uint64_t> hashes_;
};

}  // namespace lazyxla::dispatch
