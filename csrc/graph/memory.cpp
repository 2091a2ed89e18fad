#include "graph/memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>

#include "graph/execute.h"
#include "pjrt/host_memory.h"
#include "pjrt/kept_blocks.h"
#include "pjrt/runtime.h"

namespace lazyxla::graph {
namespace {

Tally reserved(const pjrt::Device& device, const pjrt::MemoryStats& ours) {
  Tally result{.current = ours.bytes.current, .peak = ours.bytes.peak};
  const auto theirs = device.allocator_stats();
  if (!theirs || !theirs->pool_bytes_is_set) return result;
  result.current = theirs->pool_bytes;
  result.peak = theirs->peak_pool_bytes_is_set ? theirs->peak_pool_bytes : result.current;
  return result;
}

}  // namespace

MemoryUse memory_use(c10::DeviceIndex index) {
  const pjrt::Device& which = pjrt_device(index);
  const pjrt::MemoryStats ours = which.memory_stats();
  return {ours.buffers, ours.bytes, reserved(which, ours)};
}

void release_kept_memory() { pjrt::release_kept_blocks(); }

std::pair<size_t, size_t> memory_info(c10::DeviceIndex index) {
  const pjrt::Device& which = pjrt_device(index);
  if (const auto theirs = which.allocator_stats(); theirs && theirs->bytes_limit_is_set) {
    return {std::max<int64_t>(theirs->bytes_limit - theirs->bytes_in_use, 0), theirs->bytes_limit};
  }
  const bool on_host = pjrt::Runtime::get().platform() == "cpu";
  const auto machine = on_host ? pjrt::machine_memory() : std::nullopt;
  TORCH_CHECK_NOT_IMPLEMENTED(machine, "lazyxla: the plugin does not tell how much memory ",
                              which.description().kind, " has");
  return {machine->available, machine->total};
}

std::map<std::string, int64_t> memory_stats(c10::DeviceIndex index) {
  const pjrt::Device& which = pjrt_device(index);
  std::map<std::string, int64_t> stats;
  const auto add = [&stats](const std::string& name, const Tally& tally) {
    stats[name + ".all.current"] = tally.current;
    stats[name + ".all.peak"] = tally.peak;
    stats[name + ".all.allocated"] = tally.allocated;
    stats[name + ".all.freed"] = tally.freed;
  };
  const pjrt::MemoryStats ours = which.memory_stats();
  add("allocation", ours.buffers);
  add("allocated_bytes", ours.bytes);
  const Tally held = reserved(which, ours);
  stats["reserved_bytes.all.current"] = held.current;
  stats["reserved_bytes.all.peak"] = held.peak;
  if (const auto theirs = which.allocator_stats()) {
    stats["plugin.bytes_in_use"] = theirs->bytes_in_use;
    const auto add_known = [&stats](const char* name, bool is_known, int64_t value) {
      if (is_known) stats[name] = value;
    };
    add_known("plugin.peak_bytes_in_use", theirs->peak_bytes_in_use_is_set,
              theirs->peak_bytes_in_use);
    add_known("plugin.bytes_limit", theirs->bytes_limit_is_set, theirs->bytes_limit);
    add_known("plugin.bytes_reserved", theirs->bytes_reserved_is_set, theirs->bytes_reserved);
    add_known("plugin.largest_free_block_bytes", theirs->largest_free_block_bytes_is_set,
              theirs->largest_free_block_bytes);
    add_known("plugin.num_allocs", theirs->num_allocs_is_set, theirs->num_allocs);
    add_known("plugin.pool_bytes", theirs->pool_bytes_is_set, theirs->pool_bytes);
    add_known("plugin.peak_pool_bytes", theirs->peak_pool_bytes_is_set, theirs->peak_pool_bytes);
  }
  return stats;
}

void reset_peak_memory_stats(c10::DeviceIndex index) { pjrt_device(index).reset_peak(); }

void reset_accumulated_memory_stats(c10::DeviceIndex index) {
  pjrt_device(index).reset_accumulated();
}

}  // namespace lazyxla::graph
