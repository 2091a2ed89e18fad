// DeviceBuffer: the data of a leaf, which exists or is promised by a flush under way. (Or will
// never exist: abstract, see record/capture.h.)
//
// A flush replaces the values of all pending storages by leaves on promised buffers before it
// lowers or runs anything, so that other threads go on recording at once; when its program is
// enqueued it keeps the promises, when it fails it breaks them and every later read throws the
// reason. A buffer can be donated: the program that consumes it is then the last that may see it.
//
// The data is on one device, or is spread over the devices of a mesh (ir/sharding.h). How a program
// of many devices spreads its results is known once it is compiled; until then a promise's sharding
// is unknown, and a graph that reads it waits before it is keyed.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/pool.h"
#include "ir/node.h"
#include "ir/sharding.h"
#include "ir/storage.h"
#include "pjrt/buffer.h"

namespace lazyxla::program {

// Data that is spread over many devices: a buffer on each of the mesh's devices that is this
// process's (program/mesh_devices.h), in the mesh's order.
struct Shards {
  const ir::Sharding* sharding;
  std::vector<pjrt::Buffer> buffers;
};

// What is thrown for a value that was not computed: RuntimeError, torch.OutOfMemoryError, or
// torch.linalg.LinAlgError for a matrix that the operator is not defined for.
enum class Failure : uint8_t { kOther, kOutOfMemory, kLinAlg };
Failure failure_of(const c10::Error& error);

class DeviceBuffer final : public ir::LeafData {
 public:
  DeviceBuffer() = default;  // a promise
  explicit DeviceBuffer(pjrt::Buffer buffer);
  explicit DeviceBuffer(Shards shards);

  // Waits for the promise (not for the data on the device). Throws the reason if it is broken.
  void await_kept();
  // The same, and throws for data that is spread over many devices.
  pjrt::Buffer& get();
  // The same for a program of one device, which may read data that every device of a mesh has
  // whole.
  pjrt::Buffer& on(const pjrt::Device& device);
  // The same for data that may be spread: null if it is on one device.
  Shards* shards();
  // The same for a program of many devices: appends a buffer for each of this process's devices.
  // Data that is on one device is copied to each other one, once.
  void add_each(const ir::Mesh& mesh, std::vector<pjrt::Buffer*>& buffers);
  // Waits until the data is on the device.
  void await();
  bool is_ready();

  // How the data is spread, or will be; null if it is not. `unknown` until the program is compiled.
  const ir::Sharding* sharding() const { return sharding_.load(std::memory_order_acquire); }
  static const ir::Sharding* unknown() { return reinterpret_cast<const ir::Sharding*>(1); }
  void promise_sharding(const ir::Sharding* sharding);
  // Waits while it is unknown. Not interruptible.
  void await_sharding() const;

  void keep(pjrt::Buffer buffer);
  void keep(Shards shards);
  bool is_kept() const { return state_.load(std::memory_order_acquire) == kReady; }
  // From now on every read throws the reason.
  void break_promise(std::string reason, Failure failure = Failure::kOther);
  // From now on it will never have data; every read throws.
  void make_abstract();
  bool is_abstract() const { return state_.load(std::memory_order_acquire) == kAbstract; }
  // Whether there is data, or will be.
  bool is_usable() const;
  // Whether another library holds its data, too (pjrt/shared_client.h).
  bool is_shared() const;

  // Of a broken promise: the content that its storage has instead (graph/undo.h).
  const ir::Content* stands_for() const { return stands_for_.get(); }
  void stand_for(ir::Content content) {
    stands_for_ = std::make_unique<ir::Content>(std::move(content));
  }

  // The value of a token of collectives (distributed/collectives.h), as far as the host knows: the
  // turn of the call that takes it, or -1.
  std::atomic<int64_t> turn{-1};

  // The number of references held by runs that wait for their execution slot (graph/runner.h). They
  // do not prevent donating the buffer to a later run.
  std::atomic<int> waiting_runs{0};

 private:
  enum State : int { kPromised, kReady, kBroken, kAbstract };
  // A copy that the device has, made if it has none.
  pjrt::Buffer& copy_on(const pjrt::Device& device, const pjrt::Buffer& source);

  // Copies, by the devices to which they were made.
  using Copies = std::map<int, pjrt::Buffer>;
  std::atomic<int> state_{kPromised};
  std::optional<pjrt::Buffer> buffer_;
  std::atomic<const ir::Sharding*> sharding_{nullptr};
  std::unique_ptr<Shards> shards_;
  std::unique_ptr<Copies> copies_;  // in the order of the runs that need them
  std::string error_;
  Failure failure_ = Failure::kOther;
  std::unique_ptr<ir::Content> stands_for_;  // guarded by the device's mutex
};

using BufferRef = std::shared_ptr<DeviceBuffer>;

template <typename... Args>
BufferRef make_buffer(Args&&... args) {
  return std::allocate_shared<DeviceBuffer>(PoolAllocator<DeviceBuffer>(),
                                            std::forward<Args>(args)...);
}

inline BufferRef buffer_ref(const ir::Node& leaf) {
  return std::static_pointer_cast<DeviceBuffer>(leaf.leaf_data());
}

// Whether the leaf's buffer dies with `references` to the leaf: nothing else refers to either.
bool dies_with(const ir::Node& leaf, size_t references);

// The leaf's buffer.
inline DeviceBuffer& buffer_of(const ir::Node& leaf) {
  return static_cast<DeviceBuffer&>(*leaf.leaf_data());
}

// A leaf on existing data.
ir::Value make_leaf(ir::TensorType type, pjrt::Buffer buffer);
ir::Value make_leaf(ir::TensorType type, Shards shards);

// A leaf on data that will never exist, with the sharding that it would have.
ir::Value make_abstract_leaf(ir::TensorType type, const ir::Sharding* sharding = nullptr);

// torch's dtype for PJRT's; throws for a dtype that XLA does not have.
PJRT_Buffer_Type pjrt_type(c10::ScalarType dtype);

}  // namespace lazyxla::program
