#include "pjrt/in_flight.h"

#include <algorithm>
#include <utility>

#include "common/fork.h"
#include "common/waiting.h"
#include "pjrt/call.h"

namespace lazyxla::pjrt {

// The thread that takes it out of the list finishes it. Others may be waiting for its event
// meanwhile.
struct InFlight::Execution {
  Execution(const PJRT_Api* api, PJRT_Event* done, std::span<PJRT_Buffer* const> handles,
            Listener listener)
      : api(api),
        done(done),
        handles(handles.begin(), handles.end()),
        listener(std::move(listener)) {}
  ~Execution() {
    if (!forked()) destroy_event(api, done);
  }
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;

  const PJRT_Api* api;
  PJRT_Event* done;
  std::vector<PJRT_Buffer*> handles;
  Listener listener;
  bool after_failure = false;  // guarded as the list
};

InFlight::~InFlight() {
  if (forked()) return;
  const auto executions = std::exchange(entered_.hold()->executions, {});
  for (const ExecutionRef& execution : executions) finish(*execution);
}

void InFlight::Entered::excuse() {
  for (const ExecutionRef& execution : executions) execution->after_failure = true;
}

void InFlight::add(PJRT_Event* done, std::span<PJRT_Buffer* const> handles, Listener listener) {
  if (is_ready(api_, done)) {  // small programs run inside the call
    Execution execution(api_, done, handles, std::move(listener));
    finish(execution);
  } else {
    auto execution = std::make_shared<Execution>(api_, done, handles, std::move(listener));
    entered_.hold()->executions.push_back(std::move(execution));
  }
  // A device runs its programs nearly in order: checking the oldest is enough.
  while (true) {
    ExecutionRef oldest;
    {
      const auto entered = entered_.hold();
      auto& executions = entered->executions;
      if (executions.empty() || !is_ready(api_, executions.front()->done)) return;
      oldest = std::move(executions.front());
      executions.pop_front();
      ++finishing_;
    }
    finish(*oldest);
    --finishing_;
    waiting::announce();
  }
}

bool InFlight::is_over() {
  const auto entered = entered_.hold();
  return finishing_ == 0 && std::ranges::all_of(entered->executions, [this](const auto& execution) {
           return is_ready(api_, execution->done);
         });
}

void InFlight::await() {
  std::deque<ExecutionRef> executions = entered_.hold()->executions;
  for (const ExecutionRef& execution : executions) {
    wait_for_event(api_, execution->done);
  }
  executions.clear();
  if (auto failure = take_failure()) throw *std::move(failure);
}

std::optional<Error> InFlight::take_failure() {
  finish_ready();
  return std::exchange(entered_.hold()->failure, std::nullopt);
}

std::optional<Error> InFlight::take_failure_of_result() {
  auto failure = take_failure();
  entered_.hold()->excuse();
  return failure;
}

void InFlight::finish_ready() {
  std::vector<ExecutionRef> ready;
  {
    const auto entered = entered_.hold();
    std::erase_if(entered->executions, [&](const ExecutionRef& execution) {
      if (!is_ready(api_, execution->done)) return false;
      ready.push_back(execution);
      return true;
    });
    finishing_ += static_cast<int>(ready.size());
  }
  for (const ExecutionRef& execution : ready) finish(*execution);
  finishing_ -= static_cast<int>(ready.size());
  waiting::announce();
  if (finishing_ == 0) return;
  waiting::wait([this] { return finishing_ == 0; });  // another thread may note a failure
}

void InFlight::finish(Execution& execution) {
  for (PJRT_Buffer* handle : execution.handles) {
    destroy_buffer(api_, handle);
  }
  std::optional<Error> failure;
  try {
    LAZYXLA_PJRT_ARGS(args, PJRT_Event_Await, event, execution.done);
    check(api_, api_->PJRT_Event_Await(&args), "running a program");  // it is ready: the result
  } catch (const Error& error) {
    failure = error;
  }
  std::optional<Error> reported = failure;
  try {
    if (execution.listener) reported = execution.listener(failure ? &*failure : nullptr);
  } catch (const std::exception& error) {  // others wait for the end of this
    if (!failure) failure = Error(PJRT_Error_Code_INTERNAL, error.what());
    reported = failure;
  }
  if (!failure) return;
  const auto entered = entered_.hold();
  if (reported && !entered->failure && !execution.after_failure) {
    entered->failure = std::move(reported);
  }
  entered->excuse();
}

}  // namespace lazyxla::pjrt
