#include "dispatch/device_state.h"

#include "common/gil.h"
#include "graph/devices.h"
#include "record/flush.h"

namespace lazyxla::dispatch {
namespace {

thread_local c10::DeviceIndex current = 0;

}  // namespace

c10::DeviceIndex current_device() noexcept { return current; }

c10::DeviceIndex exchange_device_unchecked(c10::DeviceIndex index) noexcept {
  const c10::DeviceIndex previous = current;
  if (index >= 0) {
    current = index;
  }
  return previous;
}

c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  graph::check_device_index(index);
  return exchange_device_unchecked(index);
}

c10::DeviceIndex resolve_index(c10::DeviceIndex index) {
  if (index < 0) {
    return current;
  }
  graph::check_device_index(index);
  return index;
}

void synchronize(c10::DeviceIndex index) {
  index = resolve_index(index);
  WithoutGil no_gil;
  record::sync(index);
}

}  // namespace lazyxla::dispatch
