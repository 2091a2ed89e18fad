#include "common/fork.h"

#include <pthread.h>

namespace lazyxla {
namespace {

std::atomic<int> clients_started{0};

void in_child() {
  if (clients_started.load() > 0) {
    detail::forked_with_client.store(true);
  }
}

// When the library is loaded.
const int registered [[maybe_unused]] = pthread_atfork(nullptr, nullptr, in_child);

}  // namespace

namespace detail {

std::atomic<bool> forked_with_client{false};

}  // namespace detail

ClientStarted::ClientStarted() { ++clients_started; }

ClientStarted::~ClientStarted() { --clients_started; }

}  // namespace lazyxla
