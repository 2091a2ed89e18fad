// Handles of donated buffers, waiting to be freed.
//
// On the CPU plugin, PJRT_Buffer_Destroy of a donated buffer blocks until the execution that took
// its memory is done. Freed right away, the handles would make every training step synchronous. So
// a device keeps them here together with the execution's completion event, and frees them when a
// later execution finds the event ready. They hold no device memory: that is the outputs' by then.
// The list is as long as the number of executions in flight.
#pragma once

#include <pjrt_c_api.h>

#include <deque>
#include <mutex>
#include <span>
#include <vector>

namespace lazyxla::pjrt {

class RetiredBuffers {
 public:
  explicit RetiredBuffers(const PJRT_Api& api) : api_(&api) {}
  ~RetiredBuffers();  // waits for the executions
  RetiredBuffers(const RetiredBuffers&) = delete;
  RetiredBuffers& operator=(const RetiredBuffers&) = delete;

  // Takes ownership of the handles and of `done`, and frees what is ready.
  void add(PJRT_Event* done, std::span<PJRT_Buffer* const> handles);

 private:
  struct Execution {
    PJRT_Event* done;
    std::vector<PJRT_Buffer*> handles;
  };
  bool ready(PJRT_Event* event) const;
  void free(PJRT_Event* done, std::span<PJRT_Buffer* const> handles) const;

  const PJRT_Api* api_;
  std::mutex mutex_;
  std::deque<Execution> executions_;
};

}  // namespace lazyxla::pjrt
