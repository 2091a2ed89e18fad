#include "common/fork.h"

#include <pthread.h>

#include <mutex>

namespace lazyxla {
namespace {

std::atomic<int> clients_started{0};

void in_child() {
  if (clients_started.load() > 0) {
    detail::forked_with_client.store(true);
  }
}

}  // namespace

namespace detail {

std::atomic<bool> forked_with_client{false};

}  // namespace detail

ClientStarted::ClientStarted() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, in_child); });
  ++clients_started;
}

ClientStarted::~ClientStarted() { --clients_started; }

}  // namespace lazyxla
