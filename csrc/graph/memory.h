// The devices' memory: what is in use, and what is free.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "pjrt/client.h"

namespace lazyxla::graph {

using Tally = pjrt::MemoryStats::Tally;

struct MemoryUse {
  Tally buffers;   // our arrays
  Tally bytes;     // in them
  Tally reserved;  // what the allocator holds, in use or not: the plugin's word, or else the arrays
};

// Gives freed memory that the CPU plugin keeps back to the system. PJRT has no request of that
// kind.
void release_kept_memory();

// All functions below start the client.
MemoryUse memory_use(c10::DeviceIndex index);

// Free bytes and all bytes of a device's memory: as the plugin's allocator reports them, or for the
// CPU those of the machine. Throws NotImplementedError if they are not reported.
std::pair<size_t, size_t> memory_info(c10::DeviceIndex index);

// Bytes and numbers of arrays, in the names of torch.cuda.memory_stats, and under "plugin." what
// its allocator reports.
std::map<std::string, int64_t> memory_stats(c10::DeviceIndex index);

void reset_peak_memory_stats(c10::DeviceIndex index);
void reset_accumulated_memory_stats(c10::DeviceIndex index);

}  // namespace lazyxla::graph
