#include "pjrt/call.h"

#include <atomic>
#include <memory>

#include "common/waiting.h"

namespace lazyxla::pjrt {

void wait_for_event(const PJRT_Api* api, PJRT_Event* event) {
  if (is_ready(api, event)) return;
  if (!waiting::is_interruptible()) {
    LAZYXLA_PJRT_ARGS(args, PJRT_Event_Await, event, event);
    ignore_error(api, api->PJRT_Event_Await(&args));
    return;
  }
  // The plugin's own function cannot be interrupted. An interrupted wait ends before the callback.
  struct Shared {
    const PJRT_Api* api;
    std::atomic<bool> over{false};
  };
  auto shared = std::make_shared<Shared>(api);
  LAZYXLA_PJRT_ARGS(args, PJRT_Event_OnReady, event, event);
  args.user_arg = new std::shared_ptr<Shared>(shared);
  args.callback = [](PJRT_Error* error, void* user_arg) {
    std::unique_ptr<std::shared_ptr<Shared>> shared(
        static_cast<std::shared_ptr<Shared>*>(user_arg));
    ignore_error((*shared)->api, error);  // a query of the event reports it
    (*shared)->over.store(true, std::memory_order_release);
    waiting::announce();
  };
  check(api, api->PJRT_Event_OnReady(&args), "PJRT_Event_OnReady");
  waiting::wait([&] { return shared->over.load(std::memory_order_acquire); });
}

void await_copy(const PJRT_Api* api, PJRT_Event* event, std::string_view what) {
  if (event == nullptr) return;
  LAZYXLA_PJRT_ARGS(args, PJRT_Event_Await, event, event);
  PJRT_Error* error = api->PJRT_Event_Await(&args);
  destroy_event(api, event);
  check(api, error, what);
}

void await_event(const PJRT_Api* api, PJRT_Event* event, std::string_view what) {
  if (event == nullptr) return;
  try {
    wait_for_event(api, event);
  } catch (...) {
    destroy_event(api, event);
    throw;
  }
  await_copy(api, event, what);  // it has happened: this only gets its result
}

}  // namespace lazyxla::pjrt
