#include "pjrt/disposal.h"

#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "pjrt/call.h"
#include "pjrt/host_threads.h"

namespace lazyxla::pjrt {
namespace {

constexpr size_t kFew = 128;  // freeing this many takes about as long as waking a thread

class Disposal {
 public:
  static Disposal& get() {
    static auto* instance = new Disposal();  // its thread runs until the process ends
    return *instance;
  }

  void add(const PJRT_Api& api, std::vector<PJRT_Buffer*> handles) {
    {
      std::lock_guard lock(mutex_);
      if (!started_) {
        std::thread([this] { work(); }).detach();
        started_ = true;
      }
      batches_.emplace_back(&api, std::move(handles));
    }
    wake_.notify_one();
  }

  void finish() {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return batches_.empty() && !busy_; });
  }

 private:
  using Batch = std::pair<const PJRT_Api*, std::vector<PJRT_Buffer*>>;

  void work() {
    yield_this_thread();
    std::vector<Batch> taken;
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return !batches_.empty(); });
      taken.swap(batches_);
      busy_ = true;
      lock.unlock();
      for (const auto& [api, handles] : taken) {
        for (PJRT_Buffer* handle : handles) destroy_buffer(api, handle);
      }
      taken.clear();
      lock.lock();
      busy_ = false;
      idle_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::vector<Batch> batches_;
  bool started_ = false;
  bool busy_ = false;
};

}  // namespace

void dispose_of(const PJRT_Api& api, std::vector<PJRT_Buffer*> handles) {
  if (handles.size() > kFew) return Disposal::get().add(api, std::move(handles));
  for (PJRT_Buffer* handle : handles) destroy_buffer(&api, handle);
}

void finish_disposal() { Disposal::get().finish(); }

}  // namespace lazyxla::pjrt
