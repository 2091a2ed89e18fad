#pragma once

#include <pthread.h>

#include <atomic>

namespace lazyxla {

namespace detail {

inline std::atomic<int> clients_started{0};
inline std::atomic<bool> forked_with_client{false};

// When the library is loaded.
inline const int registered = pthread_atfork(nullptr, nullptr, [] {
  if (clients_started.load() > 0) forked_with_client.store(true);
});

}  // namespace detail

class ClientStarted {
 public:
  ClientStarted() { ++detail::clients_started; }
  ~ClientStarted() { --detail::clients_started; }
  ClientStarted(const ClientStarted&) = delete;
  ClientStarted& operator=(const ClientStarted&) = delete;
};

inline bool forked() { return detail::forked_with_client.load(std::memory_order_relaxed); }

}  // namespace lazyxla
