// What is left of a client after fork(): nothing. Its threads stay in the parent, and calling into
// the plugin from the child hangs or worse. A ClientStarted exists for as long as a client does; in
// a child forked meanwhile `forked()` is true for ever. A thread that the device's work is left to
// counts as one, too.
#pragma once

#include <atomic>

namespace lazyxla::pjrt {

namespace detail {
extern std::atomic<bool> forked_with_client;
[[noreturn]] void throw_forked();
}  // namespace detail

class ClientStarted {
 public:
  ClientStarted();
  ~ClientStarted();
  ClientStarted(const ClientStarted&) = delete;
  ClientStarted& operator=(const ClientStarted&) = delete;
};

inline bool forked() { return detail::forked_with_client.load(std::memory_order_relaxed); }

// Throws in such a child; every operation that calls into the plugin begins with it.
inline void check_not_forked() {
  if (forked()) [[unlikely]] {
    detail::throw_forked();
  }
}

}  // namespace lazyxla::pjrt
