#include "pjrt/disposal.h"

#include <condition_variable>
#include <system_error>
#include <thread>
#include <utility>

#include "common/locks.h"
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

  // Takes the handles unless it throws, since there can be no more threads.
  void add(const PJRT_Api& api, std::vector<PJRT_Buffer*>& handles) {
    {
      const auto all = all_.hold();
      if (!all->started) std::thread([this] { work(); }).detach();
      all->started = true;
      all->batches.emplace_back(&api, std::move(handles));
    }
    wake_.notify_one();
  }

  void finish() {
    const auto all = all_.hold();
    all.wait(idle_, [&] { return all->batches.empty() && !all->busy; });
  }

 private:
  using Batch = std::pair<const PJRT_Api*, std::vector<PJRT_Buffer*>>;

  void work() {
    yield_this_thread();
    std::vector<Batch> taken;
    while (true) {
      {
        const auto all = all_.hold();
        all.wait(wake_, [&] { return !all->batches.empty(); });
        taken.swap(all->batches);
        all->busy = true;
      }
      for (const auto& [api, handles] : taken) {
        for (PJRT_Buffer* handle : handles) destroy_buffer(api, handle);
      }
      taken.clear();
      all_.hold()->busy = false;
      idle_.notify_all();
    }
  }

  struct All {
    std::vector<Batch> batches;
    bool started = false;
    bool busy = false;
  };
  Guarded<All> all_;
  std::condition_variable wake_, idle_;
};

}  // namespace

void dispose_of(const PJRT_Api& api, std::vector<PJRT_Buffer*> handles) {
  try {
    if (handles.size() > kFew) return Disposal::get().add(api, handles);
  } catch (const std::system_error&) {
  }
  for (PJRT_Buffer* handle : handles) destroy_buffer(&api, handle);
}

void finish_disposal() { Disposal::get().finish(); }

}  // namespace lazyxla::pjrt
