// A buffer: one array in a device's memory, perhaps still being computed.
//
// A Buffer owns its PJRT_Buffer and counts in its device's MemoryStats from creation until it is
// destroyed or consumed. A buffer is consumed when an execution takes it as a donated argument: its
// memory then belongs to one of the outputs, and any use but destroying it is an error. The value
// never changes otherwise.
//
// Work is asynchronous. The caller gets a Buffer at once; if the execution that computes it fails,
// the failure is thrown as Error by `await` and `to_host`, and by every execution that takes it as
// an argument.
#pragma once

#include <pjrt_c_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace lazyxla::pjrt {

class Device;

class Buffer {
 public:
  // Takes ownership of `raw`, which is on `device`. The second form is for callers that know how
  // many bytes it occupies there.
  static Buffer adopt(const Device& device, PJRT_Buffer* raw);
  Buffer(const Device& device, PJRT_Buffer* raw, size_t nbytes);
  // For callers that have counted it in the device's MemoryStats, with others.
  struct Counted {};
  Buffer(const Device& device, PJRT_Buffer* raw, size_t nbytes, Counted);

  ~Buffer();
  Buffer(Buffer&& other) noexcept;  // a buffer that was moved from is like a consumed one
  Buffer& operator=(Buffer&&) = delete;

  size_t nbytes() const { return nbytes_; }  // on the device, its padding included
  const Device& device() const { return *device_; }
  PJRT_Buffer* raw() const { return raw_.load(std::memory_order_acquire); }  // null once consumed

  // Whether the value is ready (or its computation has failed). Does not wait.
  bool ready() const;

  // Waits for the value. Throws if its computation failed or the buffer was consumed.
  void await() const;

  // Waits for the value and copies it to `dst` in dense row-major order, from any layout on the
  // device. `nbytes` is the room at `dst`: at least elements x element size.
  void to_host(void* dst, size_t nbytes) const;

  // A copy on another device of the same client. Asynchronous.
  Buffer copy_to_device(const Device& device) const;

  // Whether the memory is gone: consumed by an execution.
  bool is_deleted() const { return raw() == nullptr; }

 private:
  friend class Executable;

  void check_usable() const;  // throws if consumed or in a forked child

  // An execution has taken the memory. Ends this buffer's part in the accounting and returns its
  // handle, which the caller must free.
  PJRT_Buffer* consume();
  PJRT_Buffer* consume(Counted);  // the caller ends its part in the accounting, too

  const Device* device_;
  std::atomic<PJRT_Buffer*> raw_;  // null once consumed
  size_t nbytes_;
  mutable std::atomic<bool> ready_{false};  // saves another query; a failed buffer never sets it
};

}  // namespace lazyxla::pjrt
