// The devices as the dispatcher sees them: which one is current (graph/devices.h says how many
// there are).
//
// The current device belongs to a thread and starts at 0. Setting it touches no hardware.
#pragma once

#include <c10/core/Device.h>

namespace lazyxla::dispatch {

// Device types and indices in PyTorch's own types.
inline constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;

c10::DeviceIndex current_device() noexcept;

// Makes `index` current and returns the previous one; a negative index changes nothing. The checked
// form throws if `index` cannot exist.
c10::DeviceIndex exchange_device(c10::DeviceIndex index);
c10::DeviceIndex exchange_device_unchecked(c10::DeviceIndex index) noexcept;

// Replaces a negative index, PyTorch's "no index", by the current device. Throws if the device
// cannot exist.
c10::DeviceIndex resolve_index(c10::DeviceIndex index);

// Runs what is pending on the device and waits for it; a device that was never used has nothing.
void synchronize(c10::DeviceIndex index);

}  // namespace lazyxla::dispatch
