#include "dispatch/pinned.h"

#include <c10/core/CPUAllocator.h>

#include <cstdint>
#include <map>
#include <mutex>

namespace lazyxla::dispatch {
namespace {

// The live blocks: begin -> end. Never destroyed: tensors may be freed after static objects.
struct Blocks {
  std::mutex mutex;
  std::map<uintptr_t, uintptr_t> ends;
};

Blocks& blocks() {
  static auto* instance = new Blocks();
  return *instance;
}

void release(void* data) {
  {
    auto& live = blocks();
    std::lock_guard lock(live.mutex);
    live.ends.erase(reinterpret_cast<uintptr_t>(data));
  }
  c10::GetCPUAllocator()->raw_deallocate(data);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nbytes == 0 ? nullptr : c10::GetCPUAllocator()->raw_allocate(nbytes);
    if (data != nullptr) {
      const auto begin = reinterpret_cast<uintptr_t>(data);
      auto& live = blocks();
      std::lock_guard lock(live.mutex);
      live.ends[begin] = begin + nbytes;
    }
    return {data, data, data == nullptr ? &c10::detail::deleteNothing : &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dest, const void* src, size_t count) const override {
    default_copy_data(dest, src, count);
  }
};

}  // namespace

c10::Allocator* pinned_allocator() {
  static auto* instance = new PinnedAllocator();
  return instance;
}

bool is_pinned(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  auto& live = blocks();
  std::lock_guard lock(live.mutex);
  auto block = live.ends.upper_bound(address);
  return block != live.ends.begin() && address < std::prev(block)->second;
}

}  // namespace lazyxla::dispatch
