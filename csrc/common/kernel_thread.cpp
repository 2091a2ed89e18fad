#include "common/kernel_thread.h"

#include <c10/core/thread_pool.h>
#include <dlfcn.h>

#include <atomic>
#include <exception>
#include <memory>

namespace lazyxla {
namespace {

std::atomic<bool> has_begun{false};

// Not a std::promise: setting one on that thread failed (std::bad_function_call).
struct Call {
  std::atomic<int> done{0};
  std::exception_ptr error;
};

}  // namespace

void run_on_kernel_thread(const std::function<void()>& work) {
  static auto* thread = new c10::ThreadPool(1);
  if (thread->inThreadPool()) return work();
  has_begun = true;
  const auto call = std::make_shared<Call>();
  thread->run([call, &work] {
    try {
      work();
    } catch (...) {
      call->error = std::current_exception();
    }
    call->done = 1;
    call->done.notify_all();
  });
  call->done.wait(0);
  if (call->error) std::rethrow_exception(call->error);
}

void release_team() {
  if (!has_begun) return;
  // Of OpenMP 5.0. PyTorch brings the library, whose headers need not be here.
  constexpr int kSoft = 1;  // omp_pause_soft
  using Pause = int (*)(int kind, int device);
  using Device = int (*)();
  static const auto pause = reinterpret_cast<Pause>(dlsym(RTLD_DEFAULT, "omp_pause_resource"));
  static const auto device =
      reinterpret_cast<Device>(dlsym(RTLD_DEFAULT, "omp_get_initial_device"));
  if (pause && device) pause(kSoft, device());
}

}  // namespace lazyxla
