// Sharing memory with the host, where the device is the host: leaves on memory of the host's, and
// the host's look at a leaf's memory. Nothing is copied, and neither side may write.
#pragma once

#include <functional>
#include <memory>

#include "ir/node.h"

namespace lazyxla::graph {

// A leaf on dense row-major host memory, which must stay as it is until `done` is called, from any
// thread. A device that cannot use the memory itself gets a copy, which counts as an upload.
ir::Value share(const void* data, const ir::TensorType& type, c10::DeviceIndex device,
                std::function<void()> done);

// A leaf's memory, dense and row-major. The owner keeps it there, and as it is: the leaf's buffer
// is donated to no program meanwhile.
struct Memory {
  const void* data;
  std::shared_ptr<void> owner;
};

// Waits for the leaf. Throws what kept it from being computed, and NotImplementedError if its
// memory is not the host's.
Memory memory_of(const ir::Value& leaf);

}  // namespace lazyxla::graph
