// Kinds of calls that were checked once and found right, by their hashes: only the hash is kept;
// that two calls have the same hash is too unlikely to matter.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <cstdint>

#include "common/locks.h"

namespace lazyxla::dispatch {

class KnownCalls {
 public:
  bool contains(uint64_t hash) { return hashes_.hold()->count(hash) > 0; }
  void add(uint64_t hash) {
    const auto hashes = hashes_.hold();
    if (hashes->size() >= kMost) hashes->clear();
    hashes->insert(hash);
  }

 private:
  static constexpr size_t kMost = 1 << 14;
  Guarded<ska::flat_hash_set<uint64_t>, SpinLock> hashes_;
};

}  // namespace lazyxla::dispatch
