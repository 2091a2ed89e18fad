#include "graph/runner.h"

#include <c10/core/thread_pool.h>

#include <array>
#include <memory>

#include "graph/counters.h"
#include "graph/gil.h"
#include "options.h"

namespace lazyxla::graph {
namespace {

// A run that owns its parts, and is counted in its buffers while it waits.
class WaitingRun {
 public:
  explicit WaitingRun(const Run& run)
      : variant_(run.variant),
        inputs_(run.inputs.begin(), run.inputs.end()),
        slots_(run.slots.begin(), run.slots.end()),
        promises_(run.promises.begin(), run.promises.end()) {
    count(1);
  }
  ~WaitingRun() { count(-1); }
  WaitingRun(const WaitingRun&) = delete;
  WaitingRun& operator=(const WaitingRun&) = delete;

  void execute(c10::DeviceIndex device) {
    try {
      keeping(promises_, [&] { graph::execute({variant_, inputs_, slots_, promises_}, device); });
    } catch (const std::exception&) {  // whoever reads the results is told
    }
  }

 private:
  void count(int by) {
    for (const BufferRef& buffer : inputs_) buffer->waiting_runs += by;
    for (const BufferRef& buffer : promises_) buffer->waiting_runs += by;
  }

  std::shared_ptr<const Variant> variant_;
  std::vector<BufferRef> inputs_;
  std::vector<ir::ScalarValue> slots_;
  std::vector<BufferRef> promises_;
};

class Runner {
 public:
  static Runner& of(c10::DeviceIndex device) {
    static auto* all = new std::array<Runner, 256>();
    return (*all)[static_cast<uint8_t>(device)];
  }

  bool is_idle() const { return waiting_ == 0; }

  void add(std::shared_ptr<WaitingRun> run, c10::DeviceIndex device) {
    std::call_once(started_, [this] { thread_ = std::make_unique<c10::ThreadPool>(1); });
    ++waiting_;
    thread_->run([this, run = std::move(run), device]() mutable {
      run->execute(device);
      run.reset();
      --waiting_;
      waiting_.notify_all();
    });
  }

  void finish() {
    if (is_idle()) return;
    WithoutGil no_gil;
    while (int waiting = waiting_) waiting_.wait(waiting);
  }

 private:
  std::once_flag started_;
  std::unique_ptr<c10::ThreadPool> thread_;
  std::atomic<int> waiting_{0};
};

}  // namespace

void run_in_turn(const Run& run, c10::DeviceIndex device) {
  ++Counters::get().executions;
  Runner& runner = Runner::of(device);
  if ((runner.is_idle() && run.variant->is_compiled()) || options().blocking) {
    runner.finish();
    keeping(run.promises, [&] { execute(run, device); });
    return;
  }
  pjrt_device(device);  // throws in a forked child, where no thread would do the work
  runner.add(std::make_shared<WaitingRun>(run), device);
}

void finish_waiting_runs(c10::DeviceIndex device) { Runner::of(device).finish(); }

}  // namespace lazyxla::graph
