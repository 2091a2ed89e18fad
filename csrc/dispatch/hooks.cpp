// PyTorch's hooks into a device backend: functions of its generic code that are neither operators
// nor the device guard's.

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "dispatch/device_state.h"
#include "dispatch/generator.h"
#include "dispatch/pinned.h"
#include "dispatch/storage_ops.h"
#include "graph/devices.h"

namespace lazyxla::dispatch {

namespace {

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return graph::device_count_bound() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex index) const override {
    return graph::initialized() && index < graph::device_count_bound();
  }
  void init() const override {}  // devices start on first use

  c10::DeviceIndex deviceCount() const override { return graph::device_count(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchange_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return exchange_device(index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchange_device(index);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(resolve_index(index));
  }

  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }

  c10::Device getDeviceFromPtr(void*) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "lazyxla: device memory has no addresses");
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(ir::Storage::of(*storage.unsafeGetStorageImpl()), nbytes);
  }
};

// Leaked, as PyTorch wants its hooks.
[[maybe_unused]] const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace
}  // namespace lazyxla::dispatch
