// How many devices there are.
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

namespace lazyxla::graph {

c10::DeviceIndex device_count();
c10::DeviceIndex device_count_bound() noexcept;
void set_device_count_bound(int count);

// Whether the client runs. Starts nothing.
bool initialized() noexcept;

// Throws if there can be no such device, or none any more since the process was forked. Starts
// nothing.
void check_device_index(c10::DeviceIndex index);

}  // namespace lazyxla::graph
