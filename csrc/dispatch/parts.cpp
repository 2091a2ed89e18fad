#include "dispatch/parts.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <xla/ffi/api/c_api.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <vector>

namespace lazyxla::dispatch {
namespace {

// As long as it lives, parallel kernels on this thread run on it alone.
class OneThread {
 public:
  // The number is asked for first: PyTorch gives a thread the user's at the first question.
  OneThread() : before_(at::get_num_threads()) { set(1); }
  ~OneThread() { set(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  static void set(int number) {
    // PyTorch brings OpenMP's library, whose headers need not be here. Its own function would set
    // the number of all threads.
    using Set = void (*)(int number);
    static const auto function = reinterpret_cast<Set>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
    if (function) function(number);
  }

  int before_;
};

class Parts {
 public:
  Parts(int64_t count, const std::function<void(int64_t)>& work)
      : work_(work), errors_(count), left_(count) {}

  // Runs parts that no thread has begun until there are none.
  void run() {
    const int64_t count = static_cast<int64_t>(errors_.size());
    for (int64_t i = next_++; i < count; i = next_++) {
      try {
        OneThread alone;
        work_(i);
      } catch (...) {
        errors_[i] = std::current_exception();
      }
      if (--left_ == 0) left_.notify_all();
    }
  }

  void wait() {
    for (int64_t left = left_; left != 0; left = left_) left_.wait(left);
    for (const std::exception_ptr& error : errors_) {
      if (error) std::rethrow_exception(error);
    }
  }

 private:
  const std::function<void(int64_t)>& work_;  // lives until all parts are done
  std::vector<std::exception_ptr> errors_;
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> left_;
};

// Has a thread of the plugin run parts as well. False if there is none.
bool schedule(const XLA_FFI_CallFrame& frame, const std::shared_ptr<Parts>& parts) {
  auto data = std::make_unique<std::shared_ptr<Parts>>(parts);
  XLA_FFI_ThreadPool_Schedule_Args args{
      XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, nullptr, frame.ctx,
      [](void* given) {
        std::unique_ptr<std::shared_ptr<Parts>> mine(static_cast<std::shared_ptr<Parts>*>(given));
        (*mine)->run();
      },
      data.get()};
  if (XLA_FFI_Error* error = frame.api->XLA_FFI_ThreadPool_Schedule(&args)) {
    XLA_FFI_Error_Destroy_Args destroy{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
    frame.api->XLA_FFI_Error_Destroy(&destroy);
    return false;
  }
  data.release();
  return true;
}

}  // namespace

int64_t most_parts(const XLA_FFI_CallFrame& frame) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args{XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, nullptr,
                                          frame.ctx, &threads};
  if (XLA_FFI_Error* error = frame.api->XLA_FFI_ThreadPool_NumThreads(&args)) {
    XLA_FFI_Error_Destroy_Args destroy{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
    frame.api->XLA_FFI_Error_Destroy(&destroy);
    return 1;
  }
  return std::clamp<int64_t>(at::get_num_threads(), 1, std::max<int64_t>(threads, 1));
}

void run_parts(const XLA_FFI_CallFrame& frame, int64_t count,
               const std::function<void(int64_t)>& work) {
  const auto parts = std::make_shared<Parts>(count, work);
  for (int64_t i = 1; i < count && schedule(frame, parts); ++i) {
  }
  parts->run();
  parts->wait();
}

}  // namespace lazyxla::dispatch
