#include "pjrt/host_view.h"

#include <utility>

#include "common/fork.h"
#include "common/locks.h"
#include "pjrt/call.h"
#include "pjrt/client.h"

namespace lazyxla::pjrt {
namespace {

// Dense row-major: the last dimension is the most minor one.
bool is_row_major(const PJRT_Buffer_MemoryLayout& layout) {
  if (layout.type != PJRT_Buffer_MemoryLayout_Type_Tiled || layout.tiled.num_tiles != 0) {
    return false;
  }
  const size_t rank = layout.tiled.minor_to_major_size;
  for (size_t i = 0; i < rank; ++i) {
    if (layout.tiled.minor_to_major[i] != static_cast<int64_t>(rank - 1 - i)) {
      return false;
    }
  }
  return true;
}

bool lies_row_major_on_host(const PJRT_Api* api, PJRT_Buffer* raw) {
  LAZYXLA_PJRT_ARGS(on_cpu, PJRT_Buffer_IsOnCpu, buffer, raw);
  if (ignore_error(api, api->PJRT_Buffer_IsOnCpu(&on_cpu)) || !on_cpu.is_on_cpu) {
    return false;
  }
  LAZYXLA_PJRT_ARGS(layout, PJRT_Buffer_GetMemoryLayout, buffer, raw);
  return !ignore_error(api, api->PJRT_Buffer_GetMemoryLayout(&layout)) &&
         is_row_major(layout.layout);
}

struct References {
  // Keeps the memory where it is until release(). False where the plugin cannot.
  bool keep(const PJRT_Api* api, PJRT_Buffer* raw) const {
    LAZYXLA_PJRT_ARGS(args, PJRT_Buffer_IncreaseExternalReferenceCount, buffer, raw);
    return !ignore_error(api, api->PJRT_Buffer_IncreaseExternalReferenceCount(&args));
  }

  void release(const PJRT_Api* api, PJRT_Buffer* raw) const {
    LAZYXLA_PJRT_ARGS(args, PJRT_Buffer_DecreaseExternalReferenceCount, buffer, raw);
    ignore_error(api, api->PJRT_Buffer_DecreaseExternalReferenceCount(&args));
  }
};

// A buffer's handle keeps its external references in a plain list: threads that read the same
// buffer must not change it concurrently. (All other calls may be made at any time.)
constinit Guarded<References> references;

}  // namespace

std::optional<HostView> HostView::of(const Buffer& buffer) {
  const PJRT_Api* api = &buffer.device().api();
  PJRT_Buffer* raw = buffer.raw();
  if (raw != nullptr && !lies_row_major_on_host(api, raw)) {
    return std::nullopt;
  }
  buffer.await();
  if (!references.hold()->keep(api, raw)) {
    return std::nullopt;
  }
  LAZYXLA_PJRT_ARGS(pointer, PJRT_Buffer_OpaqueDeviceMemoryDataPointer, buffer, raw);
  const bool found = !ignore_error(api, api->PJRT_Buffer_OpaqueDeviceMemoryDataPointer(&pointer)) &&
                     (pointer.device_memory_ptr != nullptr || buffer.nbytes() == 0);
  if (!found) {
    references.hold()->release(api, raw);
    return std::nullopt;
  }
  return HostView(buffer, pointer.device_memory_ptr);
}

HostView::HostView(HostView&& other) noexcept
    : buffer_(std::exchange(other.buffer_, nullptr)), data_(other.data_) {}

HostView::~HostView() {
  if (buffer_ != nullptr && !forked()) {
    references.hold()->release(&buffer_->device().api(), buffer_->raw());
  }
}

}  // namespace lazyxla::pjrt
