// The devices' memory in PyTorch's terms: what torch.accelerator reports of it (graph/memory.h).
#pragma once

#include "ir/address_allocator.h"

namespace lazyxla::dispatch {

// PyTorch's allocator of the devices. Never freed.
ir::AddressAllocator& memory_allocator();

}  // namespace lazyxla::dispatch
