// A view of a buffer's memory where the device is the host: its elements, dense and row-major.
//
// A HostView keeps the memory where it is and must not outlive its Buffer. The memory is read-only:
// its reader must not write to it, and no program does as long as the Buffer is not donated.
#pragma once

#include <pjrt_c_api.h>

#include <optional>

#include "pjrt/buffer.h"

namespace lazyxla::pjrt {

class HostView {
 public:
  // Waits for the value. None if it is not in the host's memory, or in another layout. Throws if
  // the computation of the value failed or the buffer was consumed.
  static std::optional<HostView> of(const Buffer& buffer);

  ~HostView();
  HostView(HostView&& other) noexcept;
  HostView& operator=(HostView&&) = delete;

  const void* data() const { return data_; }

 private:
  HostView(const Buffer& buffer, const void* data) : buffer_(&buffer), data_(data) {}

  const Buffer* buffer_;  // null: moved from
  const void* data_;
};

}  // namespace lazyxla::pjrt
