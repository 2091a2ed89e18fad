#include "program/buffer.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "common/element_types.h"
#include "common/gil.h"
#include "common/waiting.h"
#include "pjrt/client.h"
#include "pjrt/error.h"
#include "pjrt/shared_client.h"
#include "program/mesh_devices.h"

namespace lazyxla::program {

Failure failure_of(const c10::Error& error) {
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error)) return Failure::kOutOfMemory;
  return dynamic_cast<const c10::LinAlgError*>(&error) ? Failure::kLinAlg : Failure::kOther;
}

DeviceBuffer::DeviceBuffer(pjrt::Buffer buffer) : state_(kReady), buffer_(std::move(buffer)) {}

DeviceBuffer::DeviceBuffer(Shards shards)
    : state_(kReady),
      sharding_(shards.sharding),
      shards_(std::make_unique<Shards>(std::move(shards))) {}

void DeviceBuffer::await_kept() {
  int state = state_.load(std::memory_order_acquire);
  if (state == kPromised) {
    WithoutGil no_gil;
    pjrt::check_not_forked();  // the thread that promised it is the parent's
    waiting::wait([this] { return state_.load(std::memory_order_acquire) != kPromised; });
    state = state_.load(std::memory_order_acquire);
  }
  if (state == kBroken) {
    TORCH_CHECK_WITH(OutOfMemoryError, failure_ != Failure::kOutOfMemory, error_);
    TORCH_CHECK_WITH(LinAlgError, failure_ != Failure::kLinAlg, error_);
    TORCH_CHECK(false, error_);
  }
  TORCH_CHECK(state != kAbstract,
              "lazyxla.aot: a tensor that was made while a program was recorded without running it "
              "is used to compute; it has no value");
}

pjrt::Buffer& DeviceBuffer::get() {
  await_kept();
  TORCH_CHECK_NOT_IMPLEMENTED(!shards_, "lazyxla: the tensor is spread over many devices: ",
                              shards_->sharding->text(), "; its memory is no single device's");
  return *buffer_;
}

pjrt::Buffer& DeviceBuffer::on(const pjrt::Device& device) {
  await_kept();
  if (!shards_) [[likely]]
    return *buffer_;
  if (!shards_->sharding->is_replicated()) return get();  // throws
  for (pjrt::Buffer& shard : shards_->buffers) {
    if (shard.device().index() == device.index()) return shard;
  }
  return copy_on(device, shards_->buffers.front());
}

pjrt::Buffer& DeviceBuffer::copy_on(const pjrt::Device& device, const pjrt::Buffer& source) {
  if (!copies_) copies_ = std::make_unique<Copies>();
  auto copy = copies_->find(device.index());
  if (copy != copies_->end() && copy->second.is_deleted()) {
    copies_->erase(copy);
    copy = copies_->end();
  }
  if (copy == copies_->end()) {
    copy = copies_->emplace(device.index(), source.copy_to_device(device)).first;
  }
  return copy->second;
}

Shards* DeviceBuffer::shards() {
  await_kept();
  return shards_.get();
}

void DeviceBuffer::add_each(const ir::Mesh& mesh, std::vector<pjrt::Buffer*>& buffers) {
  await_kept();
  if (shards_) {
    TORCH_INTERNAL_ASSERT(&shards_->sharding->mesh() == &mesh);
    for (pjrt::Buffer& shard : shards_->buffers) buffers.push_back(&shard);
    return;
  }
  for (const pjrt::Device* device : own_devices(mesh).devices) {
    const bool is_here = device->index() == buffer_->device().index();
    buffers.push_back(is_here ? &*buffer_ : &copy_on(*device, *buffer_));
  }
}

void DeviceBuffer::await() {
  if (Shards* shards = this->shards()) {
    for (const pjrt::Buffer& shard : shards->buffers) shard.await();
  } else {
    buffer_->await();
  }
}

bool DeviceBuffer::is_ready() {
  Shards* shards = this->shards();
  if (!shards) return buffer_->ready();
  return std::all_of(shards->buffers.begin(), shards->buffers.end(),
                     [](const pjrt::Buffer& shard) { return shard.ready(); });
}

void DeviceBuffer::promise_sharding(const ir::Sharding* sharding) {
  sharding_.store(sharding, std::memory_order_release);
  sharding_.notify_all();
}

void DeviceBuffer::await_sharding() const {
  WithoutGil no_gil;
  sharding_.wait(unknown(), std::memory_order_acquire);
}

void DeviceBuffer::keep(pjrt::Buffer buffer) {
  buffer_.emplace(std::move(buffer));
  if (sharding() != nullptr) promise_sharding(nullptr);
  state_.store(kReady, std::memory_order_release);
  waiting::announce();
}

void DeviceBuffer::keep(Shards shards) {
  shards_ = std::make_unique<Shards>(std::move(shards));
  promise_sharding(shards_->sharding);
  state_.store(kReady, std::memory_order_release);
  waiting::announce();
}

void DeviceBuffer::break_promise(std::string reason, Failure failure) {
  error_ = std::move(reason);
  failure_ = failure;
  if (sharding() == unknown()) promise_sharding(nullptr);
  state_.store(kBroken, std::memory_order_release);
  waiting::announce();
}

void DeviceBuffer::make_abstract() {
  if (sharding() == unknown()) promise_sharding(nullptr);
  state_.store(kAbstract, std::memory_order_release);
  waiting::announce();
}

bool DeviceBuffer::is_usable() const {
  const int state = state_.load(std::memory_order_acquire);
  if (state != kReady) return state == kPromised;
  return !(shards_ ? shards_->buffers.front() : *buffer_).is_deleted();
}

bool DeviceBuffer::is_shared() const {
  return is_kept() && buffer_ && pjrt::is_shared(buffer_->raw());
}

bool dies_with(const ir::Node& leaf, size_t references) {
  return leaf.use_count() == references &&
         leaf.leaf_data().use_count() == 1 + buffer_of(leaf).waiting_runs &&
         leaf.output_type(0).numel() > 0 && !buffer_of(leaf).is_shared();
}

ir::Value make_leaf(ir::TensorType type, pjrt::Buffer buffer) {
  return {ir::Node::make_leaf(std::move(type), make_buffer(std::move(buffer))), 0};
}

ir::Value make_leaf(ir::TensorType type, Shards shards) {
  return {ir::Node::make_leaf(std::move(type), make_buffer(std::move(shards))), 0};
}

ir::Value make_abstract_leaf(ir::TensorType type, const ir::Sharding* sharding) {
  auto buffer = make_buffer();
  buffer->promise_sharding(sharding);
  buffer->make_abstract();
  return {ir::Node::make_leaf(std::move(type), std::move(buffer)), 0};
}

PJRT_Buffer_Type pjrt_type(c10::ScalarType dtype) {
  switch (dtype) {
#define LAZYXLA_CASE(xla, torch) \
  case c10::ScalarType::torch:   \
    return PJRT_Buffer_Type_##xla;
    LAZYXLA_ELEMENT_TYPES(LAZYXLA_CASE)
#undef LAZYXLA_CASE
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "lazyxla: XLA has no element type for torch's ", dtype);
  }
}

}  // namespace lazyxla::program
