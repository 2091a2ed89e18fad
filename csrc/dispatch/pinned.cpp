#include "dispatch/pinned.h"

#include <c10/core/CPUAllocator.h>

#include <cstdint>
#include <map>
#include <optional>

#include "common/locks.h"
#include "graph/aliasing.h"

namespace lazyxla::dispatch {
namespace {

struct Block {
  uintptr_t end;
  bool mapped;
};

// The live blocks by their begin. Never destroyed: tensors may be freed after static objects.
auto& blocks = *new Guarded<std::map<uintptr_t, Block>>();

std::optional<Block> find(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const auto live = blocks.hold();
  auto next = live->upper_bound(address);
  if (next == live->begin()) return std::nullopt;
  const Block& block = std::prev(next)->second;
  return address < block.end ? std::optional(block) : std::nullopt;
}

void release(void* data) {
  const auto block = blocks.hold()->extract(reinterpret_cast<uintptr_t>(data));
  if (block.mapped().mapped) graph::unmap_host_memory(data);
  c10::GetCPUAllocator()->raw_deallocate(data);
}

// What is freed is the CPU allocator's again at once: there is nothing to keep, count or empty.
class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::kCPU};
    c10::DataPtr memory = c10::GetCPUAllocator()->allocate(nbytes);
    const Block block{reinterpret_cast<uintptr_t>(memory.get()) + nbytes,
                      graph::map_host_memory(memory.get(), nbytes)};
    void* data = memory.release_context();
    (*blocks.hold())[reinterpret_cast<uintptr_t>(data)] = block;
    return {data, data, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dest, const void* src, size_t count) const override {
    default_copy_data(dest, src, count);
  }

  // Transfers keep what they read alive by themselves.
  bool record_event(void*, void*, c10::Stream) override { return false; }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "lazyxla: there are no statistics of pinned memory");
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

}  // namespace

at::HostAllocator* pinned_allocator() {
  static auto* instance = new PinnedAllocator();
  return instance;
}

// For PyTorch's functions that ask the device's memory, such as torch.accelerator.empty_host_cache.
[[maybe_unused]] const bool registered = [] {
  at::setHostAllocator(c10::DeviceType::PrivateUse1, pinned_allocator());
  return true;
}();

bool is_pinned(const void* data) { return find(data).has_value(); }

bool is_mapped(const void* data) {
  const auto block = find(data);
  return block && block->mapped;
}

}  // namespace lazyxla::dispatch
