#include "graph/runner.h"

#include <array>
#include <condition_variable>
#include <map>
#include <memory>
#include <thread>

#include "common/counters.h"
#include "common/gil.h"
#include "common/options.h"
#include "common/waiting.h"
#include "graph/partitioned_run.h"
#include "pjrt/client.h"
#include "pjrt/error.h"
#include "pjrt/runtime.h"

namespace lazyxla::graph {
namespace {

thread_local bool is_unattended = false;

// A run that owns its parts, and is counted in its buffers as long as it waits.
class WaitingRun {
 public:
  WaitingRun(FindVariant find, const Run& run)
      : find_(std::move(find)),
        inputs_(run.inputs.begin(), run.inputs.end()),
        donated_(run.donated.begin(), run.donated.end()),
        slots_(run.slots.begin(), run.slots.end()),
        promises_(run.promises.begin(), run.promises.end()),
        replaced_(std::move(run.replaced)),
        draws_(run.draws) {
    for (const program::BufferRef& buffer : inputs_) ++buffer->waiting_runs;
    for (const program::BufferRef& buffer : promises_) ++buffer->waiting_runs;
  }
  ~WaitingRun() {
    let_go(inputs_);
    let_go(promises_);
  }
  WaitingRun(const WaitingRun&) = delete;
  WaitingRun& operator=(const WaitingRun&) = delete;

  void execute(c10::DeviceIndex device) {
    const Run run{inputs_, donated_, slots_, promises_, replaced_, draws_};
    try {
      keeping(run, device, [&] { graph::execute(*find_(), run, device); });
    } catch (const std::exception&) {  // a read reports it
    }
  }

 private:
  // One by one: freeing a buffer takes a while, and a reference that is not counted meanwhile would
  // keep the next flush from donating another one, so that its graph became another program.
  static void let_go(std::vector<program::BufferRef>& buffers) {
    for (program::BufferRef& buffer : buffers) {
      --buffer->waiting_runs;
      buffer.reset();
    }
  }

  FindVariant find_;
  std::vector<program::BufferRef> inputs_;
  std::vector<int> donated_;
  std::vector<ir::ScalarValue> slots_;
  std::vector<program::BufferRef> promises_;
  std::vector<Replaced> replaced_;
  std::vector<ir::Draws> draws_;
};

}  // namespace

class Runner {
 public:
  static Runner& of(c10::DeviceIndex device) {
    static auto* all = new std::array<Runner, 256>();
    return (*all)[static_cast<uint8_t>(device)];
  }

  uint64_t take() { return issued_.fetch_add(1) + 1; }

  bool is_up(uint64_t slot) const { return done_ + 1 == slot; }
  bool is_through() const { return done_ == issued_; }

  void await(uint64_t slot) {
    if (is_up(slot)) return;
    WithoutGil no_gil;
    waiting::wait([this, slot] { return done_ + 1 >= slot; });
  }

  void divide(uint64_t slot, size_t count) {
    slots_.hold()->left_of.emplace(slot, count);
    ++divided_;
  }

  void finish(uint64_t slot) {
    if (divided_ > 0 && !is_last_of(slot)) return;
    done_ = slot;
    waiting::announce();
    if (left_ == 0) return;
    {
      const auto held = slots_.hold();
    }  // the thread is either before its look, or waits
    wake_.notify_all();
  }

  // Leaves a run, or with none the mere slot, to the thread.
  void leave(uint64_t slot, std::unique_ptr<WaitingRun> run, c10::DeviceIndex device) {
    const auto slots = slots_.hold();
    if (!slots->thread.joinable()) {
      slots->thread = std::thread([this, device] { work(device); });
    }
    slots->waiting.emplace(slot, std::move(run));
    ++left_;
    wake_.notify_all();
  }

  void await_all() { await(issued_.load() + 1); }

  void note_failure(std::exception_ptr failure) {
    const auto slots = slots_.hold();
    if (!slots->failure) slots->failure = std::move(failure);
    has_failure_ = true;
  }

  std::exception_ptr take_failure() {
    if (!has_failure_) [[likely]]
      return nullptr;
    const auto slots = slots_.hold();
    has_failure_ = false;
    return std::exchange(slots->failure, nullptr);
  }

  void throw_failure() {
    if (auto failure = take_failure()) std::rethrow_exception(std::move(failure));
  }

 private:
  using Waiting = std::multimap<uint64_t, std::unique_ptr<WaitingRun>>;
  struct Slots {
    Waiting waiting;
    std::map<uint64_t, size_t> left_of;  // of each slot that was divided, how many are not over
    std::thread thread;
    std::exception_ptr failure;  // not reported yet
  };

  // Whether all parts of a slot that was divided are over now.
  bool is_last_of(uint64_t slot) {
    const auto slots = slots_.hold();
    const auto found = slots->left_of.find(slot);
    if (found == slots->left_of.end()) return true;
    if (--found->second > 0) return false;
    slots->left_of.erase(found);
    --divided_;
    return true;
  }

  void work(c10::DeviceIndex device) {
    begin_unattended_thread();
    while (true) {
      auto first = await_first();
      if (first.mapped()) first.mapped()->execute(device);
      first.mapped().reset();
      --left_;
      finish(first.key());
    }
  }

  Waiting::node_type await_first() {
    const auto slots = slots_.hold();
    Waiting& waiting = slots->waiting;
    slots.wait(wake_, [&] { return !waiting.empty() && is_up(waiting.begin()->first); });
    return waiting.extract(waiting.begin());
  }

  std::atomic<uint64_t> issued_{0};  // slots taken
  std::atomic<uint64_t> done_{0};    // all slots up to this one are over
  Guarded<Slots> slots_;
  std::condition_variable wake_;
  std::atomic<bool> has_failure_{false};
  std::atomic<int> divided_{0};  // size of `left_of`
  std::atomic<int> left_{0};     // size of `waiting`, and the one at work
};

ExecutionSlot ExecutionSlot::take(c10::DeviceIndex device) {
  pjrt::check_not_forked();
  return {device, Runner::of(device).take()};
}

std::vector<ExecutionSlot> ExecutionSlot::divide(size_t count) && {
  std::vector<ExecutionSlot> slots;
  Runner::of(device_).divide(number_, count);
  for (size_t i = 0; i < count; ++i) slots.push_back(ExecutionSlot(device_, number_));
  number_ = 0;
  return slots;
}

ExecutionSlot::~ExecutionSlot() {
  if (!number_) return;
  Runner& runner = Runner::of(device_);
  if (runner.is_up(number_)) {
    runner.finish(number_);
  } else {
    runner.leave(number_, nullptr, device_);
  }
}

void ExecutionSlot::run_now(const program::VariantRef& variant, const Run& run) {
  try {
    Runner::of(device_).await(number_);
    variant->await_compiled();
  } catch (...) {  // interrupted
    run_when_found([variant] { return variant; }, run);
    throw;
  }
  if (would_wait(*variant, run)) {
    run_when_found([variant] { return variant; }, run);
  } else {
    ++Counters::get().executions;
    keeping(run, device_, [&] { execute(*variant, run, device_); });
  }
  if (!options().blocking) return;
  WithoutGil no_gil;
  try {
    for (const program::BufferRef& promise : run.promises) promise->await();
  } catch (const pjrt::Error& e) {
    // It counts as reported from here on.
    const auto failure = variant->partition ? take_failure_of(*variant->partition->mesh)
                                            : pjrt_device(device_).take_failure();
    rethrow(failure ? *failure : e, "running the recorded operators");
  }
}

void ExecutionSlot::run_soon(const program::VariantRef& variant, const Run& run) {
  const Runner& runner = Runner::of(device_);
  if (options().blocking || (runner.is_up(number_) && variant->is_compiled())) {
    run_now(variant, run);
  } else {
    run_when_found([variant] { return variant; }, run);
  }
}

void ExecutionSlot::run_when_found(FindVariant find, const Run& run) {
  pjrt_device(device_);  // throws in a forked child, where no thread would do the work
  ++Counters::get().executions;
  Runner::of(device_).leave(std::exchange(number_, 0),
                            std::make_unique<WaitingRun>(std::move(find), run), device_);
}

bool is_idle(c10::DeviceIndex device) {
  if (!Runner::of(device).is_through()) return false;
  return !pjrt::Runtime::get().initialized() || pjrt_device(device).is_idle();
}

bool has_waiting_runs(c10::DeviceIndex device) { return !Runner::of(device).is_through(); }

void finish_waiting_runs(c10::DeviceIndex device) {
  Runner::of(device).await_all();
  Runner::of(device).throw_failure();
}

void begin_unattended_thread() { is_unattended = true; }

void note_if_unattended(c10::DeviceIndex device) {
  if (is_unattended) Runner::of(device).note_failure(std::current_exception());
}

void await_enqueued(const ir::Value& leaf, c10::DeviceIndex device) {
  try {
    program::DeviceBuffer* buffer = leaf ? &program::buffer_of(*leaf.node.get()) : nullptr;
    if (buffer && !buffer->is_abstract()) buffer->await_kept();
  } catch (const c10::Error&) {  // it reports the failure
    Runner::of(device).take_failure();
    throw;
  }
  Runner::of(device).throw_failure();
}

}  // namespace lazyxla::graph
