#include "program/workers.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "pjrt/error.h"

namespace lazyxla::program {
namespace {

thread_local bool is_worker = false;

class Workers {
 public:
  static Workers& get() {
    static auto* instance = new Workers();  // its threads run until the process ends
    return *instance;
  }

  void run(std::function<void()> job) {
    std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    if (jobs_.size() > idle_) {
      std::thread([this] { work(); }).detach();
      ++idle_;  // it will be, once it runs
    }
    wake_.notify_one();
  }

  void enter_interpreter() {
    std::lock_guard lock(mutex_);
    TORCH_CHECK(!stopped_, "lazyxla: the interpreter ends, and nothing is compiled any more");
    ++in_interpreter_;
  }

  void leave_interpreter() {
    {
      std::lock_guard lock(mutex_);
      --in_interpreter_;
    }
    left_.notify_all();
  }

  void stop() {
    std::unique_lock lock(mutex_);
    stopped_ = true;
    left_.wait(lock, [this] { return in_interpreter_ == 0; });
  }

 private:
  void work() {
    is_worker = true;
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return !jobs_.empty(); });
      std::function<void()> job = std::move(jobs_.front());
      jobs_.pop_front();
      --idle_;
      lock.unlock();
      job();
      job = nullptr;
      lock.lock();
      ++idle_;
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, left_;
  std::deque<std::function<void()>> jobs_;
  size_t idle_ = 0;
  int in_interpreter_ = 0;
  bool stopped_ = false;
};

}  // namespace

void run_on_worker(std::function<void()> job) {
  pjrt::check_not_forked();  // a child has none of the threads
  Workers::get().run(std::move(job));
}

bool on_worker() { return is_worker; }

void stop_workers() { Workers::get().stop(); }

NeedsInterpreter::NeedsInterpreter() { Workers::get().enter_interpreter(); }
NeedsInterpreter::~NeedsInterpreter() { Workers::get().leave_interpreter(); }

}  // namespace lazyxla::program
