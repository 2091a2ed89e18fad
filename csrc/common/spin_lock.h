// A lock for critical sections of a few instructions on the recording path, where a mutex's calls
// into libc would be a tenth of an operator's cost. Never held while anything is awaited.
#pragma once

#include <atomic>
#include <thread>

#include "common/fork.h"

namespace lazyxla {

class SpinLock {
 public:
  void lock() {
    while (held_.exchange(true, std::memory_order_acquire)) {
      while (held_.load(std::memory_order_relaxed)) {
        // Its holder was a thread of the parent. The guarded data may be incomplete, but every
        // address in it is valid; the child only drops its tensors.
        if (forked()) return;
        std::this_thread::yield();
      }
    }
  }
  void unlock() { held_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> held_{false};
};

}  // namespace lazyxla
