#include "pjrt/buffer.h"

#include <cstring>
#include <numeric>
#include <vector>

#include "common/fork.h"
#include "pjrt/call.h"
#include "pjrt/client.h"
#include "pjrt/error.h"
#include "pjrt/host_view.h"

namespace lazyxla::pjrt {
Buffer Buffer::adopt(const Device& device, PJRT_Buffer* raw) {
  size_t nbytes = 0;
  try {
    nbytes = on_device_nbytes(&device.api(), raw);
  } catch (...) {
    destroy_buffer(&device.api(), raw);
    throw;
  }
  return {device, raw, nbytes};
}

Buffer::Buffer(const Device& device, PJRT_Buffer* raw, size_t nbytes)
    : device_(&device), raw_(raw), nbytes_(nbytes) {
  device.usage_->add(static_cast<int64_t>(nbytes));
}

Buffer::Buffer(const Device& device, PJRT_Buffer* raw, size_t nbytes, Counted)
    : device_(&device), raw_(raw), nbytes_(nbytes) {}

Buffer::Buffer(Buffer&& other) noexcept
    : device_(other.device_),
      raw_(other.raw_.exchange(nullptr, std::memory_order_acq_rel)),
      nbytes_(other.nbytes_),
      ready_(other.ready_.load(std::memory_order_acquire)) {}

Buffer::~Buffer() {
  if (is_deleted() || forked()) {
    return;
  }
  if (PJRT_Buffer* raw = consume()) {
    destroy_buffer(&device_->api(), raw);
  }
}

PJRT_Buffer* Buffer::consume(Counted) {
  // Others may read it, but only one execution takes it, so no atomic exchange, which is slower.
  PJRT_Buffer* raw = raw_.load(std::memory_order_acquire);
  raw_.store(nullptr, std::memory_order_release);
  return raw;
}

PJRT_Buffer* Buffer::consume() {
  PJRT_Buffer* raw = raw_.exchange(nullptr, std::memory_order_acq_rel);
  if (raw != nullptr) {
    device_->usage_->remove(static_cast<int64_t>(nbytes_));
  }
  return raw;
}

void Buffer::check_usable() const {
  check_not_forked();
  if (is_deleted()) [[unlikely]] {
    throw Error(PJRT_Error_Code_FAILED_PRECONDITION,
                "a buffer was used after an execution had taken its memory (it was donated)");
  }
}

bool Buffer::ready() const {
  check_usable();
  if (ready_.load(std::memory_order_acquire)) {
    return true;
  }
  const PJRT_Api* api = &device_->api();
  PJRT_Event* event = ready_event(api, raw_);
  const bool is_there = is_ready(api, event);
  destroy_event(api, event);
  return is_there;
}

void Buffer::await() const {
  check_usable();
  if (ready_.load(std::memory_order_acquire)) {
    return;
  }
  const PJRT_Api* api = &device_->api();
  await_event(api, ready_event(api, raw_), "computing a value");
  ready_.store(true, std::memory_order_release);
}

void Buffer::to_host(void* dst, size_t nbytes) const {
  await();
  // A plain copy, if possible: far faster for small values than the plugin's, which uses another
  // thread.
  if (nbytes >= nbytes_) {
    if (const auto view = HostView::of(*this)) {
      std::memcpy(dst, view->data(), nbytes_);
      return;
    }
  }
  const PJRT_Api* api = &device_->api();
  // Dense row-major: the last dimension is the most minor one. By default the plugin writes in the
  // device's layout.
  LAZYXLA_PJRT_QUERY(shape, api, PJRT_Buffer_Dimensions, buffer, raw_);
  std::vector<int64_t> minor_to_major(shape.num_dims);
  std::iota(minor_to_major.rbegin(), minor_to_major.rend(), 0);
  PJRT_Buffer_MemoryLayout layout{};
  layout.struct_size = PJRT_Buffer_MemoryLayout_STRUCT_SIZE;
  layout.type = PJRT_Buffer_MemoryLayout_Type_Tiled;
  layout.tiled.struct_size = PJRT_Buffer_MemoryLayout_Tiled_STRUCT_SIZE;
  layout.tiled.minor_to_major = minor_to_major.data();
  layout.tiled.minor_to_major_size = minor_to_major.size();
  LAZYXLA_PJRT_ARGS(args, PJRT_Buffer_ToHostBuffer, src, raw_);
  args.host_layout = &layout;
  args.dst = dst;
  args.dst_size = nbytes;
  LAZYXLA_PJRT_CALL(api, PJRT_Buffer_ToHostBuffer, args);
  await_copy(api, args.event, "reading a value");
}

Buffer Buffer::copy_to_device(const Device& device) const {
  check_usable();
  LAZYXLA_PJRT_ARGS(args, PJRT_Buffer_CopyToDevice, buffer, raw_);
  args.dst_device = device.raw();
  LAZYXLA_PJRT_CALL(&device_->api(), PJRT_Buffer_CopyToDevice, args);
  Buffer copy = adopt(device, args.dst_buffer);
  device.note_upload(copy);
  return copy;
}

}  // namespace lazyxla::pjrt
