#include "dispatch/sharded.h"

#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_like_native.h>
#include <torch/library.h>

#include "dispatch/copies.h"
#include "dispatch/recorder.h"
#include "dispatch/tensor.h"
#include "graph/transfer.h"
#include "program/buffer.h"
#include "record/capture.h"
#include "record/recording.h"

namespace lazyxla::dispatch {
namespace {

using ir::Geometry;
using ir::Value;

c10::TensorImpl& impl_of(const at::Tensor& tensor) { return *tensor.unsafeGetTensorImpl(); }

// Declares it, on the geometry that the tensor has. Returns the data that is to be moved.
Value declare(const at::Tensor& tensor, const ir::Sharding& sharding) {
  ir::Storage& storage = storage_of(impl_of(tensor));
  const Geometry geometry = geometry_of(impl_of(tensor));
  ir::Garbage garbage;  // dropped after the mutex
  ir::PendingSet& pending = graph::pending_set(tensor.device().index());
  std::lock_guard lock(storage.mutex());
  storage.set_sharding(nullptr);  // of another base, perhaps
  if (!storage.value()) {
    storage.set_base(geometry);
  } else if (!is_whole(impl_of(tensor))) {
    storage.set_value(read(storage, geometry, pending), geometry, pending, garbage);
  }
  storage.set_sharding(&sharding);
  return storage.is_pending() ? Value() : storage.value();
}

// Replaces the storage's data, unless somebody else has.
void replace(ir::Storage& storage, const Value& leaf, Value by, c10::DeviceIndex device) {
  ir::Garbage garbage;
  ir::PendingSet& pending = graph::pending_set(device);
  std::lock_guard lock(storage.mutex());
  if (storage.value().node.get() != leaf.node.get()) return;
  storage.set_value(std::move(by), pending, garbage);
}

at::Tensor empty_like(const at::Tensor& self, std::optional<c10::ScalarType> dtype,
                      std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                      std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  at::Tensor made = at::native::empty_like(self, dtype, layout, device, pin, format);
  if (!ir::Mesh::any() || !made.defined() || !is_lazy(impl_of(made)) || !is_lazy(impl_of(self))) {
    return made;
  }
  if (!impl_of(self).has_storage() || !is_whole(impl_of(made))) return made;
  if (const ir::Sharding* sharding = known_sharding(self)) shard(made, *sharding);
  return made;
}

at::Tensor to_copy(const at::Tensor& self, std::optional<c10::ScalarType> dtype,
                   std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                   std::optional<bool> pin, bool non_blocking,
                   std::optional<c10::MemoryFormat> format) {
  at::Tensor made = at::native::_to_copy(self, dtype, layout, device, pin, non_blocking, format);
  if (!ir::Mesh::any() || made.device() != self.device() || !is_whole(impl_of(made))) return made;
  if (const ir::Sharding* sharding = known_sharding(self)) shard(made, *sharding);
  return made;
}

at::Tensor constrain_on_host(const at::Tensor& self, c10::string_view) { return self.clone(); }

at::Tensor constrain_on_meta(const at::Tensor& self, c10::string_view) {
  return at::empty_like(self);
}

TORCH_LIBRARY_FRAGMENT(lazyxla, m) { m.def("constrain(Tensor self, str sharding) -> Tensor"); }

TORCH_LIBRARY_IMPL(lazyxla, CPU, m) { m.impl("constrain", TORCH_FN(constrain_on_host)); }

TORCH_LIBRARY_IMPL(lazyxla, Meta, m) { m.impl("constrain", TORCH_FN(constrain_on_meta)); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty_like", TORCH_FN(empty_like));
  m.impl("_to_copy", TORCH_FN(to_copy));
}

}  // namespace

void shard(const at::Tensor& tensor, const ir::Sharding& sharding) {
  TORCH_CHECK_VALUE(is_lazy(impl_of(tensor)), "lazyxla: a tensor on ", tensor.device(),
                    " cannot be sharded; move it with .to(\"lazyxla\") before");
  ir::Storage& storage = storage_of(impl_of(tensor));
  const Geometry geometry = geometry_of(impl_of(tensor));
  TORCH_CHECK_VALUE(geometry.offset == 0 &&
                        static_cast<size_t>(geometry.nbytes()) == storage.nbytes() &&
                        ir::is_dense(geometry.sizes, geometry.strides),
                    "lazyxla: a tensor of shape ", tensor.sizes(),
                    " that is a view of a part of its memory cannot be sharded; shard the tensor "
                    "that it is a view of, or a copy");
  const Value leaf = declare(tensor, sharding);
  if (!leaf) return;
  graph::DeviceBuffer& buffer = graph::buffer_of(*leaf.node.get());
  if (!buffer.is_abstract()) buffer.await_sharding();
  const ir::Sharding* before = buffer.sharding();
  if (before == &sharding) return;
  TORCH_CHECK_VALUE(buffer.is_abstract() || !graph::Capture::current(),
                    "lazyxla.aot: a tensor of shape ", tensor.sizes(),
                    " that has data cannot be sharded while programs are recorded without running "
                    "them; shard it before, or make it in between");
  const c10::DeviceIndex device = tensor.device().index();
  if (before && &before->mesh() == &sharding.mesh()) {
    const Value moved = constrain(leaf, sharding);
    replace(storage, leaf, moved, device);
    return after_recording(device, moved.node->spec()->id);
  }
  if (buffer.is_abstract()) {
    return replace(storage, leaf, graph::make_abstract_leaf(leaf.type(), &sharding), device);
  }
  std::vector<char> host(leaf.type().nbytes());
  graph::download(leaf, host.data());
  replace(storage, leaf, graph::upload(host.data(), leaf.type(), sharding), device);
}

const ir::Sharding* declared_sharding(const at::Tensor& tensor) {
  // A tensor that torch.func wraps has no memory of its own.
  if (!ir::Mesh::any() || !tensor.has_storage()) return nullptr;
  ir::Storage& storage = storage_of(impl_of(tensor));
  std::lock_guard lock(storage.mutex());
  return is_whole(impl_of(tensor)) ? storage.sharding() : nullptr;
}

const ir::Sharding* known_sharding(const at::Tensor& tensor) {
  if (!ir::Mesh::any() || !tensor.has_storage()) return nullptr;
  ir::Storage& storage = storage_of(impl_of(tensor));
  std::lock_guard lock(storage.mutex());
  if (!is_whole(impl_of(tensor))) return nullptr;
  const Value& value = storage.value();
  if (storage.sharding() || !value || !value.node->is_leaf()) return storage.sharding();
  const ir::Sharding* found = graph::buffer_of(*value.node.get()).sharding();
  return found == graph::DeviceBuffer::unknown() ? nullptr : found;
}

const ir::Sharding* sharding_of(const at::Tensor& tensor) {
  if (!ir::Mesh::any() || !is_lazy(impl_of(tensor))) return nullptr;
  ir::Storage& storage = storage_of(impl_of(tensor));
  bool whole;
  {
    std::lock_guard lock(storage.mutex());
    whole = is_whole(impl_of(tensor));
    if (whole && storage.sharding() && (!storage.value() || storage.is_pending())) {
      return storage.sharding();
    }
  }
  const Value leaf = computed(whole ? tensor : contiguous_copy(tensor)).leaf;
  if (!leaf) return nullptr;
  graph::DeviceBuffer& buffer = graph::buffer_of(*leaf.node.get());
  buffer.await_sharding();
  return buffer.sharding();
}

}  // namespace lazyxla::dispatch
