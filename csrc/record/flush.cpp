#include "record/flush.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include "common/user_line.h"
#include "graph/execute.h"
#include "graph/run_pending.h"
#include "graph/runner.h"
#include "graph/walk.h"
#include "pjrt/error.h"
#include "program/mesh_devices.h"
#include "program/workers.h"
#include "record/backward_threads.h"
#include "record/capture.h"
#include "record/settings.h"

namespace lazyxla::record {

namespace {

program::OnHost may_run_on_host() {
  if (current_mode() == Mode::kEager) return program::OnHost::kOneOperator;
  return c10::GradMode::is_enabled() ? program::OnHost::kTraining : program::OnHost::kFirstRuns;
}

}  // namespace

void flush(c10::DeviceIndex device, Cause cause) {
  pjrt::check_not_forked();  // before a slot is taken: a child has no thread that it could wait for
  ir::PendingSet& mine = pending_set(device);
  ir::PendingSet& shared = Recording::shared().pending(device);
  {
    std::lock_guard lock(ir::device_mutex(device));
    if (shared.first && &shared != &mine) mine.adopt_all(shared);
    if (!mine.first) return;
  }
  flush(mine, cause);
}

void flush(ir::PendingSet& pending, Cause cause) {
  TORCH_CHECK(!program::on_worker(),
              "lazyxla: a lowering rule computes with tensors of the device; it must build the "
              "computation into the program instead");
  check_unbroken(cause);  // may ask Python for the user's line: not under the mutex
  if (const auto capture = Capture::current()) {
    program::Graph graph;
    if (graph::detach(pending, current_options(), graph, [] {})) capture->take(graph);
    return;
  }
  if (program::client_spans_processes()) await_backward_thread(pending.device);
  const bool may_divide = !in_region() && cause != Cause::kRegionEnd;
  const bool apart = cause == Cause::kApart;
  graph::run_pending(pending,
                     {.options = current_options(),
                      .may_divide = may_divide,
                      .nobody_waits = cause == Cause::kMode,
                      .origin = [&] {
                        const bool is_free = may_divide && !apart;
                        return program::Origin{
                            .line = user_line(),
                            .admit = apart ? nullptr : program_counter(),
                            .may_cut = is_free && current_mode() == Mode::kLazy,
                            .on_host = is_free ? may_run_on_host() : program::OnHost::kNone};
                      }});
}

void run_apart(c10::DeviceIndex device,
               c10::function_ref<void(ir::PendingSet&, ir::Garbage&)> record) {
  Recording& recording = Recording::current();
  ir::PendingSet apart(device, recording.regions);
  struct Leave {  // what cannot be run remains pending
    ~Leave() {
      std::lock_guard lock(ir::device_mutex(from.device));
      to.adopt_all(from);
    }
    ir::PendingSet &from, &to;
  } leave{apart, recording.pending(device)};
  {
    ir::Garbage garbage;  // dropped after the mutex
    std::lock_guard lock(ir::device_mutex(device));
    record(apart, garbage);
  }
  flush(apart, Cause::kApart);
}

Mark::Mark(c10::DeviceIndex device)
    : device_(device), recording_(Recording::current().shared_from_this()) {
  ir::PendingSet& pending = recording_->pending(device);
  std::lock_guard lock(ir::device_mutex(device));
  flushes_ = pending.flushes;
}

void Mark::reach() {
  if (!recording_) return;
  ir::PendingSet& pending = recording_->pending(device_);
  bool is_pending;
  {
    std::lock_guard lock(ir::device_mutex(device_));
    is_pending = pending.flushes == flushes_ && pending.regions == 0;
  }
  if (is_pending) {
    flush(pending, Cause::kSync);
    flush(Recording::shared().pending(device_), Cause::kSync);  // which a thread's end moves it to
  }
  graph::finish_waiting_runs(device_);
  graph::wait_for(device_);
  recording_.reset();
}

void sync(c10::DeviceIndex device) {
  flush(device, Cause::kSync);
  graph::finish_waiting_runs(device);
  graph::wait_for(device);
}

}  // namespace lazyxla::record
