// Pinned host memory, for tensor.pin_memory() and DataLoader(pin_memory=True).
//
// Pinned memory is the CPU allocator's, *mapped* for the devices where the plugin offers that
// (pjrt::Client::map_host_memory): then they fetch it themselves, and x.to(device,
// non_blocking=True) does not wait for it. Elsewhere, for example on the CPU, a transfer copies the
// data before it returns, so pinning gains nothing.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

namespace lazyxla::dispatch {

at::HostAllocator* pinned_allocator();

// Whether the address is in a live block of pinned memory.
bool is_pinned(const void* data);
// ... which devices can fetch.
bool is_mapped(const void* data);

}  // namespace lazyxla::dispatch
