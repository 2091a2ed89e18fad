// The allocator behind at::empty and friends. It returns made-up addresses (see storage.h), since
// the plugin manages a device's memory; the derived class answers PyTorch's queries about that
// memory.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

namespace lazyxla::ir {

class AddressAllocator : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) final;
  void copy_data(void*, const void*, std::size_t) const final;

  // A device has one stream.
  void recordStream(const c10::DataPtr&, c10::Stream) final {}
};

}  // namespace lazyxla::ir
