#include "graph/devices.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "common/gil.h"
#include "pjrt/error.h"
#include "pjrt/runtime.h"

namespace lazyxla::graph {
namespace {

constexpr int kMaxDevices = std::numeric_limits<c10::DeviceIndex>::max();

std::atomic<int> count_bound{1};

c10::DeviceIndex clamp(int count) {
  return static_cast<c10::DeviceIndex>(std::clamp(count, 0, kMaxDevices));
}

}  // namespace

c10::DeviceIndex device_count() {
  auto& runtime = pjrt::Runtime::get();
  if (runtime.initialized()) {
    return clamp(runtime.device_count());
  }
  // Starting a client can take seconds; other Python threads go on meanwhile.
  WithoutGil no_gil;
  return clamp(runtime.device_count());
}

bool initialized() noexcept { return pjrt::Runtime::get().initialized(); }

c10::DeviceIndex device_count_bound() noexcept {
  if (initialized()) {
    try {
      return clamp(pjrt::Runtime::get().device_count());
    } catch (...) {  // a forked child: the devices are the parent's
      return 0;
    }
  }
  return clamp(count_bound.load(std::memory_order_relaxed));
}

void set_device_count_bound(int count) { count_bound.store(count, std::memory_order_relaxed); }

// The bound suffices: the first use of the device checks the exact count, and asking for it here
// would start the client.
void check_device_index(c10::DeviceIndex index) {
  pjrt::check_not_forked();
  const int count = device_count_bound();
  TORCH_CHECK_INDEX(index < count, "lazyxla: device index ", static_cast<int>(index),
                    " is out of range, there ", count == 1 ? "is " : "are ", count, " device",
                    count == 1 ? "" : "s", " (LAZYXLA_CPU_DEVICES sets the number of CPU devices)");
}

}  // namespace lazyxla::graph
