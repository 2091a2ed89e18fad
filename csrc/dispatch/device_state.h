// The devices as the dispatcher sees them: how many there are and which one is current.
//
// The current device belongs to a thread and starts at 0. Setting it touches no hardware.
//
// PyTorch asks for the number of devices long before a program uses one: its autograd engine sizes
// its thread pool by it in the very first backward pass, a CPU-only one included, and never again.
// Starting an accelerator for that would be wrong (a TPU can be opened by one process only), and
// answering 0 would leave our devices without an autograd thread. Hence two counts:
//   device_count()        exact; starts the client if it is not running, and may throw
//   device_count_bound()  never starts anything; exact once the client runs, until then an upper
//                         bound that lazyxla/platforms.py reads off the platform and the machine
#pragma once

#include <c10/core/Device.h>

namespace lazyxla::dispatch {

// Device types and indices in PyTorch's own types.
inline constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;

c10::DeviceIndex device_count();
c10::DeviceIndex device_count_bound() noexcept;
void set_device_count_bound(int count);

// Whether the client runs. Starts nothing.
bool initialized() noexcept;

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
