#include "in_flight.h"

#include <exception>
#include <utility>

#include "call.h"
#include "fork.h"

namespace lazyxla::pjrt {

InFlight::~InFlight() {
  if (forked()) {
    return;
  }
  for (const Execution& execution : executions_) {
    free(execution.done, execution.handles);
  }
}

void InFlight::add(PJRT_Event* done, std::span<PJRT_Buffer* const> handles) {
  // Small programs run inside the call: nothing to wait for, and nothing to allocate.
  if (ready(done)) {
    free(done, handles);
    done = nullptr;
  }
  std::vector<Execution> finished;
  {
    std::lock_guard lock(mutex_);
    if (done != nullptr) {
      executions_.push_back({done, {handles.begin(), handles.end()}});
    }
    // A device runs its programs in order, or nearly so: looking at the oldest is enough.
    while (!executions_.empty() && ready(executions_.front().done)) {
      finished.push_back(std::move(executions_.front()));
      executions_.pop_front();
    }
  }
  for (const Execution& execution : finished) {
    free(execution.done, execution.handles);
  }
}

void InFlight::await() {
  std::deque<Execution> executions;
  {
    std::lock_guard lock(mutex_);
    executions = std::exchange(executions_, {});
  }
  std::exception_ptr failure;
  for (const Execution& execution : executions) {
    try {
      await_event(api_, execution.done, "running a program");
    } catch (const Error&) {
      if (!failure) {
        failure = std::current_exception();
      }
    }
    free(nullptr, execution.handles);
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
}

bool InFlight::ready(PJRT_Event* event) const {
  LAZYXLA_PJRT_ARGS(args, PJRT_Event_IsReady);
  args.event = event;
  return ignore_error(api_, api_->PJRT_Event_IsReady(&args)) || args.is_ready;
}

void InFlight::free(PJRT_Event* done, std::span<PJRT_Buffer* const> handles) const {
  for (PJRT_Buffer* handle : handles) {
    destroy_buffer(api_, handle);
  }
  destroy_event(api_, done);
}

}  // namespace lazyxla::pjrt
