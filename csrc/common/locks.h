// Locks. There are two kinds; which one something needs follows from what happens while it is held.
//
// A Guarded value has a lock of its own, and can be reached only while that is held:
//
//     Guarded<std::map<std::string, int>> counts;
//     ++(*counts.hold())["add"];         // held until the end of the statement
//     const auto held = counts.hold();   // held until the end of the block
//     held->erase("mul");
//
// They have no order, thanks to one rule: while one is held no other lock is taken, nothing is
// awaited (but a condition, which releases it), and nothing is called that might do so: Python, a
// run, the destructor of what others own. What is to be dropped is moved out, and dropped later.
// Mind that an argument of a call through hold() is computed while it is held.
//
// Whatever cannot keep the rule has an OrderedMutex, with a row in docs/design.md. Built with
// LAZYXLA_CHECK_LOCKS, the process ends where the rule is broken.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>
#include <utility>

#ifdef LAZYXLA_CHECK_LOCKS
#include <cstdio>
#include <cstdlib>
#endif

#include "common/fork.h"

namespace lazyxla {

#ifdef LAZYXLA_CHECK_LOCKS
inline thread_local int guarded_held = 0;

// To be called where a lock is taken, or something awaited.
inline void check_none_held() {
  if (guarded_held == 0) return;
  std::fputs("lazyxla: a Guarded value is held where another lock is taken\n", stderr);
  std::abort();
}
inline void count_held(int change) { guarded_held += change; }
#else
inline void check_none_held() {}
inline void count_held(int) {}
#endif

// A lock for critical sections of a few instructions on the recording path, where a mutex's calls
// into libc would be a tenth of an operator's cost. Never held while anything is awaited.
class SpinLock {
 public:
  void lock() {
    check_none_held();
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

// For what is taken in the order of docs/design.md.
class OrderedMutex : public std::mutex {
 public:
  void lock() {
    check_none_held();
    std::mutex::lock();
  }
  bool try_lock() {
    check_none_held();
    return std::mutex::try_lock();
  }
};

template <typename T, typename Lock = std::mutex>
class Guarded {
 public:
  class Held {
   public:
    ~Held() {
      count_held(-1);
      guarded_.lock_.unlock();
    }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

    T& operator*() const { return guarded_.value_; }
    T* operator->() const { return &guarded_.value_; }

    // Waits on a std::condition_variable until `ready()`; the lock is free meanwhile.
    template <typename Condition, typename Ready>
    void wait(Condition& condition, Ready ready) const {
      borrowed([&](auto& lock) { condition.wait(lock, std::move(ready)); });
    }
    // The same until a time at most. Whether it is ready.
    template <typename Condition, typename Time, typename Ready>
    bool wait_until(Condition& condition, const Time& time, Ready ready) const {
      return borrowed(
          [&](auto& lock) { return condition.wait_until(lock, time, std::move(ready)); });
    }

   private:
    friend class Guarded;
    explicit Held(Guarded& guarded) : guarded_(guarded) {
      check_none_held();
      guarded_.lock_.lock();
      count_held(1);
    }
    template <typename Wait>
    auto borrowed(Wait wait) const {
      struct Borrowed : std::unique_lock<Lock> {
        using std::unique_lock<Lock>::unique_lock;
        ~Borrowed() { this->release(); }
      } lock(guarded_.lock_, std::adopt_lock);
      return wait(static_cast<std::unique_lock<Lock>&>(lock));
    }

    Guarded& guarded_;
  };

  constexpr Guarded() = default;
  explicit Guarded(T value) : value_(std::move(value)) {}

  [[nodiscard]] Held hold() { return Held(*this); }

 private:
  Lock lock_;
  T value_{};
};

}  // namespace lazyxla
