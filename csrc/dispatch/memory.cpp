#include "dispatch/memory.h"

#include "dispatch/device_state.h"
#include "graph/devices.h"
#include "graph/memory.h"

namespace lazyxla::dispatch {
namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;

Stat to_stat(const graph::Tally& tally) {
  Stat stat;
  stat.current = tally.current;
  stat.peak = tally.peak;
  stat.allocated = tally.allocated;
  stat.freed = tally.freed;
  return stat;
}

class DeviceMemory final : public ir::AddressAllocator {
 public:
  bool initialized() override { return graph::initialized(); }

  void emptyCache(c10::MempoolId_t) override { graph::release_kept_memory(); }

  DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const graph::MemoryUse use = graph::memory_use(resolve_index(index));
    constexpr auto kAll = static_cast<size_t>(StatType::AGGREGATE);
    DeviceStats stats;
    stats.allocation[kAll] = stats.active[kAll] = to_stat(use.buffers);
    stats.allocated_bytes[kAll] = stats.active_bytes[kAll] = stats.requested_bytes[kAll] =
        to_stat(use.bytes);
    stats.reserved_bytes[kAll] = to_stat(use.reserved);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    graph::reset_accumulated_memory_stats(resolve_index(index));
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    graph::reset_peak_memory_stats(resolve_index(index));
  }
  // Without "override", which would not compile with a torch that does not ask for it yet.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) {
    return graph::memory_info(resolve_index(index));
  }
};

}  // namespace

ir::AddressAllocator& memory_allocator() {
  static auto* instance = new DeviceMemory();
  return *instance;
}

}  // namespace lazyxla::dispatch
