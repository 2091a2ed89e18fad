// Executions in flight on a device: their completion events, and the buffers they took.
//
// Every execution is entered here, whatever becomes of its results, so that a program can wait
// until the device has done all its work.
//
// On the CPU plugin, PJRT_Buffer_Destroy of a donated buffer blocks until the execution that took
// its memory is done. Freed right away, the handles would make every training step synchronous. So
// they are kept here, too, and freed when a later execution finds the event ready. They hold no
// device memory: that is the outputs' by then.
//
// The list is as long as the number of executions in flight.
#pragma once

#include <pjrt_c_api.h>

#include <deque>
#include <exception>
#include <mutex>
#include <span>
#include <vector>

namespace lazyxla::pjrt {

class InFlight {
 public:
  explicit InFlight(const PJRT_Api& api) : api_(&api) {}
  ~InFlight();  // waits for the executions
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;

  // Takes ownership of the handles and of `done`, and frees what is ready.
  void add(PJRT_Event* done, std::span<PJRT_Buffer* const> handles);

  // Whether all executions entered so far are over.
  bool is_over();

  // Waits for all executions entered so far. Throws the first failure since it was called last,
  // after all are over.
  void await();

 private:
  struct Execution {
    PJRT_Event* done;
    std::vector<PJRT_Buffer*> handles;
  };
  bool ready(PJRT_Event* event) const;
  void finish(PJRT_Event* done, std::span<PJRT_Buffer* const> handles);

  const PJRT_Api* api_;
  std::mutex mutex_;
  std::deque<Execution> executions_;
  int awaiting_ = 0;  // threads that wait for executions they took out of the list
  std::exception_ptr failure_;
};

}  // namespace lazyxla::pjrt
