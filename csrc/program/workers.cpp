#include "program/workers.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <thread>

#include "common/locks.h"
#include "pjrt/error.h"

namespace lazyxla::program {
namespace {

thread_local bool is_worker = false;
thread_local int interpreter_scopes = 0;  // within one another

class Workers {
 public:
  static Workers& get() {
    static auto* instance = new Workers();  // its threads run until the process ends
    return *instance;
  }

  void run(std::function<void()> job) {
    const auto all = all_.hold();
    all->jobs.push_back(std::move(job));
    if (all->jobs.size() > all->idle) {
      std::thread([this] { work(); }).detach();
      ++all->idle;  // it will be, once it runs
    }
    wake_.notify_one();
  }

  void enter_interpreter() {
    bool stopped;
    {
      const auto all = all_.hold();
      stopped = all->stopped;
      if (!stopped) ++all->in_interpreter;
    }
    if (stopped) throw InterpreterEnds();
  }

  void leave_interpreter() {
    --all_.hold()->in_interpreter;
    left_.notify_all();
  }

  void stop() {
    const auto all = all_.hold();
    all->stopped = true;
    all.wait(left_, [&] { return all->in_interpreter == 0; });
  }

 private:
  void work() {
    is_worker = true;
    while (true) {
      await_job()();  // what the job holds is free before the worker counts as idle
      ++all_.hold()->idle;
    }
  }

  std::function<void()> await_job() {
    const auto all = all_.hold();
    all.wait(wake_, [&] { return !all->jobs.empty(); });
    std::function<void()> job = std::move(all->jobs.front());
    all->jobs.pop_front();
    --all->idle;
    return job;
  }

  struct All {
    std::deque<std::function<void()>> jobs;
    size_t idle = 0;
    int in_interpreter = 0;
    bool stopped = false;
  };
  Guarded<All> all_;
  std::condition_variable wake_, left_;
};

}  // namespace

void run_on_worker(std::function<void()> job) {
  pjrt::check_not_forked();  // a child has none of the threads
  Workers::get().run(std::move(job));
}

bool on_worker() { return is_worker; }

void stop_workers() { Workers::get().stop(); }

NeedsInterpreter::NeedsInterpreter() {
  if (interpreter_scopes == 0) Workers::get().enter_interpreter();
  ++interpreter_scopes;
}

NeedsInterpreter::~NeedsInterpreter() {
  if (--interpreter_scopes == 0) Workers::get().leave_interpreter();
}

}  // namespace lazyxla::program
