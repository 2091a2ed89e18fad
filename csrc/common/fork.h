// What is left of a client after fork(): nothing. Its threads stay in the parent, and calling into
// the plugin from the child hangs or worse. A ClientStarted exists for as long as a client does; in
// a child forked meanwhile `forked()` is true for ever. A thread to which the device's work is left
// counts as one, too.
#pragma once

#include <atomic>

namespace lazyxla {

namespace detail {
extern std::atomic<bool> forked_with_client;
}  // namespace detail

class ClientStarted {
 public:
  ClientStarted();
  ~ClientStarted();
  ClientStarted(const ClientStarted&) = delete;
  ClientStarted& operator=(const ClientStarted&) = delete;
};

inline bool forked() { return detail::forked_with_client.load(std::memory_order_relaxed); }

}  // namespace lazyxla
