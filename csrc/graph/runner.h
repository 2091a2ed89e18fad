// The runner: runs programs in their order while some of them still compile.
//
// In the eager modes no caller waits for a program to be compiled. Compiling is done by a pool of
// threads (program/workers.h), and a run whose program is not ready yet, or that has others before
// it, is left to a dedicated thread. The caller goes on to the next operator, whose program may be
// compiled at the same time; its results are promised, and a read of one waits for it. In steady
// state nothing compiles, and the caller runs everything itself.
//
// The order is that in which results were promised: an ExecutionSlot is taken under the device's
// mutex, together with the promises. So a run may donate memory that earlier runs read, and none
// waits for a promise that a later one keeps, even if they come from different threads.
//
// A wait that is interrupted is no failure either: the run is left, and done as soon as it can be.
//
// Errors of a run that was left are raised by the reads of its results. Storages that have what
// they had before it again would not show them, so the next read of any value raises them, or the
// next wait for the device. With LAZYXLA_BLOCKING nothing is left.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "graph/execute.h"

namespace lazyxla::graph {

class Runner;

// Returns the program of a run, perhaps after waiting for it, or throws why there is none.
using FindVariant = std::function<program::VariantRef()>;

// A position in a device's order. Must be used once; dropped unused, it lets the next ones pass.
class ExecutionSlot {
 public:
  // Caller holds the mutex of the device.
  static ExecutionSlot take(c10::DeviceIndex device);

  ExecutionSlot(ExecutionSlot&& other) noexcept
      : device_(other.device_), number_(std::exchange(other.number_, 0)) {}
  ExecutionSlot& operator=(ExecutionSlot&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(number_, other.number_);
    return *this;
  }
  ~ExecutionSlot();

  // Divides this position into `count` slots, in any order among themselves. Those that follow wait
  // for all.
  std::vector<ExecutionSlot> divide(size_t count) &&;

  bool is_used() const { return number_ == 0; }

  // Runs it before returning, after those before it.
  void run_now(const program::VariantRef& variant, const Run& run);

  // Runs it as soon as it can be run: often now.
  void run_soon(const program::VariantRef& variant, const Run& run);

  // Leaves it, to be run when its slot comes and its program is found.
  void run_when_found(FindVariant find, const Run& run);

 private:
  ExecutionSlot(c10::DeviceIndex device, uint64_t number) : device_(device), number_(number) {}

  c10::DeviceIndex device_;
  uint64_t number_;  // 0: used
};

// Whether every run whose slot was taken is over, and the device has nothing to do.
bool is_idle(c10::DeviceIndex device);

// Whether a run whose slot was taken is still to be enqueued.
bool has_waiting_runs(c10::DeviceIndex device);

// Waits until every run whose slot was taken before has been enqueued on the device. Throws what
// was noted.
void finish_waiting_runs(c10::DeviceIndex device);

// To be called by a thread that runs what nobody waits for: failures that undo something there are
// noted.
void begin_unattended_thread();

// Notes the exception that is being handled, if nobody waits for this thread and none is noted.
void note_if_unattended(c10::DeviceIndex device);

// For the reader of a value, a leaf or nothing: waits until the run that computes it was enqueued.
// Throws what it failed with, or what was noted.
void await_enqueued(const ir::Value& leaf, c10::DeviceIndex device);

}  // namespace lazyxla::graph
