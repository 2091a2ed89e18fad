// Flush: runs what is recorded. Users call it a sync.
//
// The graph room does the work (graph/run_pending.h). A flush returns when the program is enqueued;
// the data arrives later, and a read of it waits. Any thread may flush; a flush takes the device's
// mutex only to detach what is pending, so others go on recording meanwhile.
//
// A flush is a transaction (graph/undo.h). If lowering, compiling or enqueueing fails it throws,
// every storage that had data before has that data again, and tensors that were made by what failed
// throw the same reason when read. Where nothing had data before there is nothing to undo: if one
// operator cannot be lowered then, what does not depend on it remains pending.
//
// An interrupt ends the waiting, not the flush: its program is compiled and run all the same, by
// other threads.
//
// While a capture (capture.h) is active nothing is run: all results are abstract.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>

#include <memory>

#include "ir/storage.h"
#include "record/recording.h"
#include "record/scope.h"

namespace lazyxla::record {

// Runs all that the calling thread has pending on the device, and what belongs to the whole process
// (recording.h). No-op if nothing is. Throws if the thread is in a region that `cause` must not
// break.
void flush(c10::DeviceIndex device, Cause cause);

// The same for a pending set of any thread.
void flush(ir::PendingSet& pending, Cause cause);

// Runs what `record` records, under the device's mutex, in the set that it is given. What is
// pending remains so, and a region that the thread is in remains one program.
void run_apart(c10::DeviceIndex device,
               c10::function_ref<void(ir::PendingSet&, ir::Garbage&)> record);

// A point in what a thread has recorded for a device.
class Mark {
 public:
  // The calling thread's, now.
  explicit Mark(c10::DeviceIndex device);

  // Runs what was recorded before, unless its thread is within a region, and waits until the device
  // has done it.
  void reach();

 private:
  c10::DeviceIndex device_;
  std::shared_ptr<Recording> recording_;  // null once reached
  uint64_t flushes_;
};

// Flushes, and waits until the device has computed it all. Execution errors surface.
void sync(c10::DeviceIndex device);

}  // namespace lazyxla::record
