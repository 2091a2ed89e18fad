// Workers: threads that lower and compile.
//
// Python delivers a Ctrl-C to its main thread at any moment, as an exception, and jaxlib's MLIR
// bindings do not outlive one: they crash the process. So nothing is lowered in the thread of the
// program's author. A worker does it, and the thread that needs the program waits
// (common/waiting.h). If that wait is interrupted the worker continues, and its result is kept for
// the next thread that needs it.
//
// A worker has none of the caller's thread-local state: no modes of PyTorch's, no scope. What a job
// needs of it is handed over.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "common/gil.h"
#include "common/waiting.h"
#include "common/warnings.h"

namespace lazyxla::program {

// Does `job` on some worker, at once: a new thread is started if all are busy.
void run_on_worker(std::function<void()> job);

// Whether the calling thread is a worker.
bool on_worker();

// No worker begins anything after this; a job that is asked for throws. Returns when the jobs that
// need the interpreter are over.
void stop_workers();

// Nothing can be done in Python any more.
struct InterpreterEnds : std::runtime_error {
  InterpreterEnds() : std::runtime_error("lazyxla: the interpreter ends, and runs no Python now") {}
};

// Marks a stretch of a job that runs Python: stop_workers waits for it. Throws InterpreterEnds
// after stop_workers, but not within another one.
class NeedsInterpreter {
 public:
  NeedsInterpreter();
  ~NeedsInterpreter();
  NeedsInterpreter(const NeedsInterpreter&) = delete;
  NeedsInterpreter& operator=(const NeedsInterpreter&) = delete;
};

// The future result of a job: a value or an exception.
template <typename T>
class Outcome {
 public:
  bool is_there() const { return there_.load(std::memory_order_acquire); }

  // Waits, without the GIL. An interrupt ends the waiting, not the job.
  void wait() const {
    if (is_there()) return;
    WithoutGil no_gil;
    waiting::wait([this] { return is_there(); });
  }

  // Waits; throws what the job threw. The first call raises the job's warnings, which Python would
  // not see as such on another thread.
  const T& get() const {
    wait();
    if (!told_.exchange(true)) {
      for (const c10::Warning& warning : warnings_) c10::warn(warning);
    }
    if (error_) std::rethrow_exception(error_);
    return value_;
  }

  void fulfil(std::function<T()> job) {
    {
      KeptWarnings warnings;
      try {
        value_ = job();
      } catch (...) {
        error_ = std::current_exception();
      }
      warnings_ = warnings.all();
    }
    job = nullptr;  // what it holds is free by the time that the outcome is known
    there_.store(true, std::memory_order_release);
    waiting::announce();
  }

 private:
  std::atomic<bool> there_{false};
  mutable std::atomic<bool> told_{false};
  std::vector<c10::Warning> warnings_;
  T value_{};
  std::exception_ptr error_;
};

// Starts `job` on a worker. It must own what it uses: the caller may be gone before it ends.
template <typename T>
std::shared_ptr<const Outcome<T>> start_on_worker(std::function<T()> job) {
  auto outcome = std::make_shared<Outcome<T>>();
  run_on_worker([outcome, job = std::move(job)]() mutable { outcome->fulfil(std::move(job)); });
  return outcome;
}

}  // namespace lazyxla::program
