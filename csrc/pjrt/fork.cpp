#include "fork.h"

#include <pthread.h>

#include <mutex>

#include "error.h"

namespace lazyxla::pjrt {
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

void throw_forked() {
  throw Error(PJRT_Error_Code_FAILED_PRECONDITION,
              "lazyxla was initialised before this process was forked, and its device does not "
              "survive a fork; use the spawn start method, for example "
              "torch.multiprocessing.set_start_method(\"spawn\"), or fork before the first use of "
              "the device");
}

}  // namespace detail

ClientStarted::ClientStarted() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, in_child); });
  ++clients_started;
}

ClientStarted::~ClientStarted() { --clients_started; }

}  // namespace lazyxla::pjrt
