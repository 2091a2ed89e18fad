// The device guard: how PyTorch's generic code switches devices and handles streams and events.
//
// A device runs its programs in the order they are enqueued, so it has one stream, and a stream
// waiting for an event has nothing to do. The one stream has two ids: 0 for the default stream, and
// 1 for all streams that a program makes. PyTorch takes a stream with the current one's id for
// current, and would not make its device current. Operators are recorded and run later, so an event
// marks a point in what its thread has recorded: it has passed once everything recorded before it
// has been flushed and has finished. A query flushes and waits, since otherwise a loop that queries
// until the event has passed would never end. A timing event waits when it is recorded: the time
// between two of them is then the device's, not the recorder's.

#include <c10/core/DeviceCapability.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include "common/element_types.h"
#include "common/fork.h"
#include "common/gil.h"
#include "common/locks.h"
#include "dispatch/device_state.h"
#include "graph/devices.h"
#include "record/flush.h"

namespace lazyxla::dispatch {
namespace {

using Clock = std::chrono::steady_clock;

struct Recorded {
  std::optional<record::Mark> mark;
  uint64_t records = 0;
  bool timing = false;
  Clock::time_point time;
};
using Event = Guarded<Recorded>;

enum StreamName : int8_t { kDefaultStream = 0, kOtherStream = 1 };

// The id of the thread's current stream on each device.
thread_local std::array<StreamName, 128> current_stream{};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDeviceType; }

  c10::Device exchangeDevice(c10::Device device) const override {
    check_type(device);
    return {kDeviceType, exchange_device(device.index())};
  }
  c10::Device getDevice() const override { return {kDeviceType, current_device()}; }
  void setDevice(c10::Device device) const override {
    check_type(device);
    exchange_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    exchange_device_unchecked(device.index());
  }
  // Not the exact number: see device_state.h.
  c10::DeviceIndex deviceCount() const noexcept override { return graph::device_count_bound(); }
  // All element types of PyTorch that XLA knows.
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    c10::DeviceCapability capability;
    uint64_t bits = 0;
#define LAZYXLA_BIT(xla, torch) bits |= uint64_t{1} << c10::kIndex_##torch;
    LAZYXLA_ELEMENT_TYPES(LAZYXLA_BIT)
#undef LAZYXLA_BIT
    capability.capability_data.capability_bits = bits;
    return capability;
  }

  // Autograd asks for a tensor's device where an error ends the process. In a forked child that
  // device is no error yet: using its data is.
  c10::Stream getStream(c10::Device device) const override {
    const bool is_lost = forked() && device.has_index();
    const c10::DeviceIndex index = is_lost ? device.index() : resolve_index(device.index());
    return stream(index, current_stream[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(resolve_index(device.index()), kDefaultStream);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(resolve_index(device.index()), kOtherStream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const c10::DeviceIndex index = resolve_index(next.device_index());
    const bool is_default = next.id() == kDefaultStream;
    return stream(index,
                  std::exchange(current_stream[index], is_default ? kDefaultStream : kOtherStream));
  }
  bool queryStream(const c10::Stream& stream) const override {
    synchronize(stream.device_index());
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(stream.device_index());
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override { synchronize(index); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    const c10::DeviceIndex index = resolve_index(stream.device_index());
    const bool timing = flag == c10::EventFlag::BACKEND_DEFAULT;
    if (timing) {
      synchronize(index);
    }
    if (*event == nullptr) {
      *event = new Event();
    }
    std::optional<record::Mark> mark;
    if (!timing) mark.emplace(index);  // a timing event has passed already
    const auto marked = static_cast<Event*>(*event)->hold();
    marked->mark.swap(mark);
    ++marked->records;
    marked->timing = timing;
    marked->time = Clock::now();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  // One stream, in order: later work cannot overtake the event.
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    WithoutGil no_gil;
    auto& marked = *static_cast<Event*>(event);
    Recorded before = *marked.hold();
    if (!before.mark) return;
    before.mark->reach();
    std::optional<record::Mark> reached;  // outlives the lock
    const auto now = marked.hold();
    if (now->records == before.records) now->mark.swap(reached);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK_VALUE(start != nullptr && end != nullptr,
                      "lazyxla: both events must be recorded before their times are compared");
    const Recorded first = *static_cast<Event*>(start)->hold();
    const Recorded second = *static_cast<Event*>(end)->hold();
    TORCH_CHECK_VALUE(first.timing && second.timing,
                      "lazyxla: both events must be created with enable_timing=True");
    return std::chrono::duration<double, std::milli>(second.time - first.time).count();
  }

 private:
  static void check_type(c10::Device device) {
    TORCH_CHECK(device.type() == kDeviceType, "lazyxla: expected a lazyxla device, got ", device);
  }
  static c10::Stream stream(c10::DeviceIndex index, StreamName name) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, index), name);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace
}  // namespace lazyxla::dispatch
