#include "dispatch/sharded.h"

#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_like_native.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "dispatch/copies.h"
#include "dispatch/device_state.h"
#include "dispatch/recorder.h"
#include "dispatch/tensor.h"
#include "graph/transfer.h"
#include "program/buffer.h"
#include "program/mesh_devices.h"
#include "record/capture.h"
#include "record/recording.h"

namespace lazyxla::dispatch {
namespace {

using ir::Dims;
using ir::Geometry;
using ir::Value;

c10::TensorImpl& impl_of(const at::Tensor& tensor) { return *tensor.unsafeGetTensorImpl(); }

// Whether a tensor has memory that may be spread. What torch.func wraps has none, nor do subclasses
// that stand for other tensors, such as DTensor.
bool has_memory(const at::Tensor& tensor) {
  if (!ir::Mesh::any() || !is_lazy(impl_of(tensor)) || !tensor.has_storage()) return false;
  const c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  return storage.allocator() == ir::allocator() || storage.data();
}

bool is_all_content(const at::Tensor& tensor) {
  std::lock_guard lock(storage_of(impl_of(tensor)).mutex());
  return is_whole(impl_of(tensor));
}

// Declares the sharding on the tensor's geometry. Returns the data that is to be moved.
Value declare(const at::Tensor& tensor, const ir::Sharding& sharding) {
  ir::Storage& storage = storage_of(impl_of(tensor));
  const Geometry geometry = geometry_of(impl_of(tensor));
  ir::Garbage garbage;  // dropped after the mutex
  ir::PendingSet& pending = record::pending_set(tensor.device().index());
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

// Replaces the storage's data, unless another thread has.
void replace(ir::Storage& storage, const Value& leaf, Value by, c10::DeviceIndex device) {
  ir::Garbage garbage;
  ir::PendingSet& pending = record::pending_set(device);
  std::lock_guard lock(storage.mutex());
  if (storage.value().node.get() != leaf.node.get()) return;
  storage.set_value(std::move(by), pending, garbage);
}

// Whether it is no view of a part of its memory.
bool is_all_memory(const at::Tensor& tensor) {
  return covers(geometry_of(impl_of(tensor)), storage_of(impl_of(tensor)));
}

at::Tensor empty_like(const at::Tensor& self, std::optional<c10::ScalarType> dtype,
                      std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                      std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  at::Tensor made = at::native::empty_like(self, dtype, layout, device, pin, format);
  shard_like(made, self);
  return made;
}

at::Tensor clone(const at::Tensor& self, std::optional<c10::MemoryFormat> format) {
  at::Tensor made = at::native::clone(self, format);
  shard_like(made, self);
  return made;
}

at::Tensor to_copy(const at::Tensor& self, std::optional<c10::ScalarType> dtype,
                   std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                   std::optional<bool> pin, bool non_blocking,
                   std::optional<c10::MemoryFormat> format) {
  at::Tensor made = at::native::_to_copy(self, dtype, layout, device, pin, non_blocking, format);
  shard_like(made, self);
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
  m.impl("clone", TORCH_FN(clone));
  m.impl("empty_like", TORCH_FN(empty_like));
  m.impl("_to_copy", TORCH_FN(to_copy));
}

}  // namespace

void check_shardable(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(is_lazy(impl_of(tensor)), "lazyxla: a tensor on ", tensor.device(),
                    " cannot be sharded; move it with .to(\"lazyxla\") before");
  TORCH_CHECK_VALUE(is_all_memory(tensor), "lazyxla: a tensor of shape ", tensor.sizes(),
                    " that is a view of a part of its memory cannot be sharded; shard the tensor "
                    "that it is a view of, or a copy");
}

void shard(const at::Tensor& tensor, const ir::Sharding& sharding) {
  check_shardable(tensor);
  ir::Storage& storage = storage_of(impl_of(tensor));
  const Value leaf = declare(tensor, sharding);
  if (!leaf) return;
  program::DeviceBuffer& buffer = program::buffer_of(*leaf.node.get());
  if (!buffer.is_abstract()) buffer.await_sharding();
  const ir::Sharding* before = buffer.sharding();
  if (before == &sharding) return;
  TORCH_CHECK_VALUE(buffer.is_abstract() || !record::Capture::current(),
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
    return replace(storage, leaf, program::make_abstract_leaf(leaf.type(), &sharding), device);
  }
  std::vector<char> host(leaf.type().nbytes());
  graph::download(computed_here(tensor).leaf, host.data());
  replace(storage, leaf, graph::upload(host.data(), leaf.type(), sharding), device);
}

bool try_shard(const at::Tensor& tensor, const ir::Sharding& sharding) {
  if (!has_memory(tensor) || !is_all_memory(tensor)) return false;
  shard(tensor, sharding);
  return true;
}

void shard_like(const at::Tensor& made, const at::Tensor& from) {
  if (!made.defined() || made.device() != from.device() || !has_memory(made)) return;
  if (!is_whole(impl_of(made))) return;
  if (const ir::Sharding* sharding = known_sharding(from)) shard(made, *sharding);
}

at::Tensor shard_local(const at::Tensor& local, const ir::Sharding& sharding) {
  TORCH_CHECK_VALUE(local.is_cpu() && local.layout() == at::kStrided,
                    "lazyxla: what a process has of a sharded tensor must be on the CPU, it is on ",
                    local.device());
  const program::MeshDevices& own = program::own_devices(sharding.mesh());
  std::set<std::vector<int64_t>> tiles;
  for (const size_t position : own.positions) tiles.insert(sharding.tile_of(position));
  Dims first, count;  // of the tiles in each dimension
  size_t count_in_block = 1;
  for (size_t i = 0; i < sharding.rank(); ++i) {
    const auto compare = [i](const auto& a, const auto& b) { return a[i] < b[i]; };
    first.push_back((*std::ranges::min_element(tiles, compare))[i]);
    count.push_back((*std::ranges::max_element(tiles, compare))[i] - first[i] + 1);
    count_in_block *= count[i];
  }
  TORCH_CHECK_VALUE(count_in_block == tiles.size(), "lazyxla: the devices of this process hold ",
                    tiles.size(), " parts of a tensor sharded as ", sharding.text(),
                    ", which are not one block of it");
  Dims sizes, origin;
  for (size_t i = 0; i < sharding.rank(); ++i) {
    TORCH_CHECK_VALUE(local.size(i) % count[i] == 0, "lazyxla: dimension ", i, " of ",
                      local.sizes(), ", which a process has of a sharded tensor, is split over ",
                      count[i], " of its devices, and does not divide evenly");
    const int64_t shard = local.size(i) / count[i];
    sizes.push_back(shard * sharding.tiles(i));
    origin.push_back(shard * first[i]);
  }
  const at::Tensor host = local.resolve_conj().resolve_neg().contiguous();
  const Geometry geometry = Geometry::contiguous(host.scalar_type(), sizes);
  at::Tensor tensor(
      make_tensor(geometry, static_cast<size_t>(geometry.nbytes()), current_device()));
  declare(tensor, sharding);
  const graph::Block block{origin,
                           {host.sizes().begin(), host.sizes().end()},
                           static_cast<const char*>(host.const_data_ptr())};
  set_leaf(tensor, graph::upload_blocks({host.scalar_type(), sizes}, sharding,
                                        [&](const Dims&) { return block; }));
  return tensor;
}

Blocks local_blocks(const at::Tensor& tensor) {
  const Value leaf = computed(is_all_content(tensor) ? tensor : contiguous_copy(tensor)).leaf;
  if (!leaf) return local_blocks(at::zeros_like(tensor));  // nothing was written yet
  Blocks blocks;
  graph::download_blocks(leaf, [&](const graph::Block& block) {
    at::Tensor host = at::empty(block.size, at::TensorOptions().dtype(tensor.scalar_type()));
    std::memcpy(host.mutable_data_ptr(), block.data, host.nbytes());
    blocks.emplace_back(std::vector<int64_t>(block.begin.begin(), block.begin.end()),
                        std::move(host));
  });
  return blocks;
}

void set_local_blocks(const at::Tensor& tensor, const ir::Sharding& sharding,
                      const Blocks& blocks) {
  const ir::TensorType type{tensor.scalar_type(), {tensor.sizes().begin(), tensor.sizes().end()}};
  const auto block_at = [&](const Dims& begin) -> graph::Block {
    for (const auto& [at, host] : blocks) {
      if (!std::ranges::equal(at, begin)) continue;
      return {begin,
              {host.sizes().begin(), host.sizes().end()},
              static_cast<const char*>(host.const_data_ptr())};
    }
    // A device whose part is padding only.
    return {begin, Dims(begin.size(), 0), nullptr};
  };
  set_leaf(tensor, graph::upload_blocks(type, sharding, block_at));
}

const ir::Sharding* declared_sharding(const at::Tensor& tensor) {
  if (!has_memory(tensor)) return nullptr;
  ir::Storage& storage = storage_of(impl_of(tensor));
  std::lock_guard lock(storage.mutex());
  return is_whole(impl_of(tensor)) ? storage.sharding() : nullptr;
}

const ir::Sharding* known_sharding(const at::Tensor& tensor) {
  if (!has_memory(tensor)) return nullptr;
  ir::Storage& storage = storage_of(impl_of(tensor));
  std::lock_guard lock(storage.mutex());
  if (!is_whole(impl_of(tensor))) return nullptr;
  const Value& value = storage.value();
  if (storage.sharding() || !value || !value.node->is_leaf()) return storage.sharding();
  const ir::Sharding* found = program::buffer_of(*value.node.get()).sharding();
  return found == program::DeviceBuffer::unknown() ? nullptr : found;
}

const ir::Sharding* sharding_of(const at::Tensor& tensor) {
  if (!has_memory(tensor)) return nullptr;
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
  program::DeviceBuffer& buffer = program::buffer_of(*leaf.node.get());
  buffer.await_sharding();
  return buffer.sharding();
}

}  // namespace lazyxla::dispatch
