// Sharing memory with the host. Where the device is the host: leaves on host memory, and the host's
// view of a leaf's memory; nothing is copied, and neither side may write. Elsewhere: host memory
// that is mapped for the devices, which then fetch it themselves.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "ir/node.h"

namespace lazyxla::graph {

// A leaf on dense row-major host memory, which must not change until `done` is called, from any
// thread. A device that cannot use the memory itself gets a copy, which counts as an upload.
ir::Value share(const void* data, const ir::TensorType& type, c10::DeviceIndex device,
                std::function<void()> done);

// A leaf's memory, dense and row-major. The owner keeps it allocated and unchanged: the leaf's
// buffer is not donated meanwhile.
struct Memory {
  const void* data;
  std::shared_ptr<void> owner;
};

// Waits for the leaf. Throws the reason if it was not computed, and NotImplementedError if its
// memory is not the host's.
Memory memory_of(const ir::Value& leaf);

// Lends the leaf's buffer to the library that shares our client (pjrt/shared_client.h).
void lend(const ir::Value& leaf, const std::function<void()>& take);

// A leaf of this type on a buffer of that library, and its device.
std::pair<ir::Value, c10::DeviceIndex> borrow(const ir::TensorType& type,
                                              const std::function<void()>& ask);

// Maps host memory for the devices, until it is unmapped. False if the plugin does not offer that.
bool map_host_memory(void* data, size_t nbytes);
void unmap_host_memory(void* data);

// A leaf that is fetched from mapped host memory, dense and row-major, which must not change until
// `done` is called, from any thread.
ir::Value upload_mapped(const void* data, const ir::TensorType& type, c10::DeviceIndex device,
                        std::function<void()> done);

}  // namespace lazyxla::graph
