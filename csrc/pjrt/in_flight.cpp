#include "in_flight.h"

#include <algorithm>
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
    finish(execution.done, execution.handles);
  }
}

void InFlight::add(PJRT_Event* done, std::span<PJRT_Buffer* const> handles) {
  // Small programs run inside the call: nothing to wait for, and nothing to allocate.
  if (ready(done)) {
    finish(done, handles);
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
    finish(execution.done, execution.handles);
  }
}

bool InFlight::is_over() {
  std::lock_guard lock(mutex_);
  return awaiting_ == 0 && std::ranges::all_of(executions_, [this](const Execution& execution) {
           return ready(execution.done);
         });
}

void InFlight::await() {
  std::deque<Execution> executions;
  std::exception_ptr failure;
  {
    std::lock_guard lock(mutex_);
    executions = std::exchange(executions_, {});
    failure = std::exchange(failure_, nullptr);
    ++awaiting_;
  }
  for (const Execution& execution : executions) {
    try {
      await_event(api_, execution.done, "running a program");
    } catch (const Error&) {
      if (!failure) {
        failure = std::current_exception();
      }
    }
    finish(nullptr, execution.handles);
  }
  {
    std::lock_guard lock(mutex_);
    --awaiting_;
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

void InFlight::finish(PJRT_Event* done, std::span<PJRT_Buffer* const> handles) {
  for (PJRT_Buffer* handle : handles) {
    destroy_buffer(api_, handle);
  }
  if (done == nullptr) {
    return;
  }
  try {
    await_event(api_, done, "running a program");  // it is ready: this only asks how it ended
  } catch (const Error&) {
    std::lock_guard lock(mutex_);
    if (!failure_) {
      failure_ = std::current_exception();
    }
  }
}

}  // namespace lazyxla::pjrt
