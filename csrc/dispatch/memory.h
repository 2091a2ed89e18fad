// The devices' memory in PyTorch's terms: what torch.accelerator and torch.lazyxla tell of it.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "ir/address_allocator.h"

namespace lazyxla::dispatch {

// PyTorch's allocator of the devices. Never freed.
ir::AddressAllocator& memory_allocator();

// Free bytes and all bytes of a device's memory: what the plugin's allocator tells, for the CPU the
// machine's. Throws NotImplementedError if nobody tells. Starts the client.
std::pair<size_t, size_t> memory_info(c10::DeviceIndex index);

// Bytes and numbers of arrays, in the names of torch.cuda.memory_stats, and under "plugin." what
// its allocator tells. Starts the client.
std::map<std::string, int64_t> memory_stats(c10::DeviceIndex index);

void reset_peak_memory_stats(c10::DeviceIndex index);
void reset_accumulated_memory_stats(c10::DeviceIndex index);

}  // namespace lazyxla::dispatch
