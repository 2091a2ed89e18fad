// Executions in flight on a device: their completion events, and the buffers they took.
//
// Every execution is entered here, even if its results are not used, so that a program can wait
// until the device has done all its work.
//
// On the CPU plugin, PJRT_Buffer_Destroy of a donated buffer blocks until the execution that took
// its memory is done. Freed right away, the handles would make every training step synchronous. So
// they are kept here, too, and freed when a later execution finds the event ready. They hold no
// device memory: that is the outputs' by then.
//
// Uploads are entered, too, as far as they are still under way: a wait for the device includes what
// was sent to it.
//
// A failure is reported once: by `await`, or by the first read of a failed result (`take_failure`).
// If other executions that were in flight at that time fail, too, this is taken for a consequence,
// which only their results report.
//
// The list is as long as the number of executions in flight.
#pragma once

#include <pjrt_c_api.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/locks.h"
#include "pjrt/error.h"

namespace lazyxla::pjrt {

class InFlight {
 public:
  // Called once when the execution is over, by any thread that notices it, without locks: with
  // null, or the error. Returns the failure that is to be reported, if any.
  using Listener = std::function<std::optional<Error>(const Error*)>;

  explicit InFlight(const PJRT_Api& api) : api_(&api) {}
  ~InFlight();  // waits for the executions
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;

  // Takes ownership of the handles and of `done`, and frees what is ready.
  void add(PJRT_Event* done, std::span<PJRT_Buffer* const> handles, Listener listener = {});

  // Whether all executions entered so far are over.
  bool is_over();

  // Waits for all executions entered so far; other threads may wait for them, too. Throws the first
  // failure that was not reported yet, after all are over. An interrupt loses nothing.
  void await();

  // The first failure that was not reported yet, among executions that are over. It counts as
  // reported from then on.
  std::optional<Error> take_failure();

  // The same for the reader of a failed result: failures of what is in flight now are that failure
  // or its consequences, and not reported again.
  std::optional<Error> take_failure_of_result();

 private:
  struct Execution;
  using ExecutionRef = std::shared_ptr<Execution>;
  void finish(Execution& execution);
  void finish_ready();

  struct Entered {
    std::deque<ExecutionRef> executions;
    std::optional<Error> failure;
    void excuse();  // failures of what is in flight now are consequences
  };

  const PJRT_Api* api_;
  Guarded<Entered> entered_;
  std::atomic<int> finishing_{0};  // executions out of the list that are not quite over
};

}  // namespace lazyxla::pjrt
