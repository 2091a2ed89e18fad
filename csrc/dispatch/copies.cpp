#include "dispatch/copies.h"

#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <atomic>
#include <memory>
#include <optional>

#include "common/gil.h"
#include "common/user_line.h"
#include "common/waiting.h"
#include "dispatch/device_state.h"
#include "dispatch/pinned.h"
#include "dispatch/recorder.h"
#include "dispatch/sharded.h"
#include "dispatch/tensor.h"
#include "graph/aliasing.h"
#include "graph/runner.h"
#include "graph/transfer.h"
#include "program/buffer.h"
#include "program/mesh_devices.h"
#include "record/capture.h"
#include "record/flush.h"
#include "record/recording.h"
#include "record/scope.h"

namespace lazyxla::dispatch {
namespace {

using ir::Geometry;
using ir::Value;

c10::TensorImpl& impl_of(const at::Tensor& tensor) { return *tensor.unsafeGetTensorImpl(); }

constexpr uint64_t kAssignment = 0;  // OpSpec's ids start at 1

// Records target = source, both on the same device and of the same shape and dtype category.
void assign(const at::Tensor& target, const at::Tensor& source) {
  ir::Garbage garbage;
  {
    ir::PendingSet& pending = record::pending_set(target.device().index());
    std::lock_guard lock(ir::device_mutex(pending.device));
    Value value = cast(read(impl_of(source), pending), target.scalar_type());
    write(impl_of(target), std::move(value), pending, garbage);
  }
  after_recording(target.device().index(), kAssignment);
}

bool has_base_geometry(const at::Tensor& tensor, const Geometry& base) {
  if (tensor.is_conj() || tensor.is_neg()) return false;
  return tensor.storage_offset() == 0 && tensor.scalar_type() == base.dtype &&
         ir::same_layout(tensor.sizes(), tensor.strides(), base.sizes, base.strides);
}

// Whether to read the whole storage for a part of it: a transfer of little data costs less than
// compiling a program that slices the part.
bool read_whole(const at::Tensor& part, const Geometry& base) {
  if (part.is_conj() || part.is_neg()) return false;
  constexpr int64_t kSmall = 1 << 20;
  return part.scalar_type() == base.dtype &&
         (base.nbytes() <= kSmall || base.numel() <= 2 * part.numel());
}

// Whether a tensor's data can be read through its storage.
bool is_readable(const at::Tensor& tensor) {
  ir::Storage& storage = storage_of(impl_of(tensor));
  std::lock_guard lock(storage.mutex());
  if (has_base_geometry(tensor, storage.base())) return true;
  return !storage.is_pending() && read_whole(tensor, storage.base());
}

// `tensor` itself if its data can be read through its storage, else a copy that can.
at::Tensor readable(const at::Tensor& tensor) {
  return is_readable(tensor) ? tensor : contiguous_copy(tensor);
}

// Copies a dense row-major tensor to the device. With `non_blocking` mapped memory is read after
// the call, and kept until then; a write to it meanwhile changes what arrives.
Value upload(const at::Tensor& host, c10::DeviceIndex device, bool non_blocking) {
  ir::TensorType type{host.scalar_type(), {host.sizes().begin(), host.sizes().end()}};
  const void* data = host.const_data_ptr();
  if (!is_mapped(data)) return graph::upload(data, type, device);
  const auto arrived = std::make_shared<std::atomic<bool>>(false);
  auto done = [arrived, memory = host.storage()] {
    arrived->store(true);
    waiting::announce();
  };
  Value leaf = graph::upload_mapped(data, type, device, std::move(done));
  if (!non_blocking) {
    WithoutGil no_gil;
    waiting::wait([&arrived] { return arrived->load(); });
  }
  return leaf;
}

void copy_from_host(const at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  at::Tensor host = source.resolve_conj().resolve_neg();
  // Convert on the side that makes the transfer smaller.
  bool narrow = c10::elementSize(self.scalar_type()) <= c10::elementSize(host.scalar_type());
  if (narrow) host = host.to(self.scalar_type());
  host = host.contiguous();
  const bool is_content = host.sizes() == self.sizes() && narrow;
  const ir::Sharding* sharding = is_content ? declared_sharding(self) : nullptr;
  Value leaf = sharding
                   ? graph::upload(host.const_data_ptr(),
                                   {host.scalar_type(), {host.sizes().begin(), host.sizes().end()}},
                                   *sharding)
                   : upload(host, self.device().index(), non_blocking);
  if (is_content) {
    set_leaf(self, std::move(leaf));
    return;
  }
  at::Tensor staged = empty_like_contiguous(host, host.scalar_type(), self.device().index());
  set_leaf(staged, std::move(leaf));
  assign(self, staged.expand(self.sizes()));
}

// As PyTorch's copy does. (A copy that starts or ends on the CPU is cast there, and warns there.)
void warn_of_lost_parts(const at::Tensor& target, const at::Tensor& source) {
  const c10::ScalarType dtype = target.scalar_type();
  if (source.is_complex() && !c10::isComplexType(dtype) && dtype != c10::ScalarType::Bool) {
    TORCH_WARN_ONCE("Casting complex values to real discards the imaginary part");
  }
}

// Whether the source's data can be written to the target's memory in its own order: in rows.
bool lands_in_rows(const at::Tensor& self, const at::Tensor& source) {
  return self.is_cpu() && self.is_contiguous() && !self.is_conj() && !self.is_neg() &&
         self.scalar_type() == source.scalar_type() && self.sizes() == source.sizes();
}

// The elements that a memory holds, if `tensor` is all its bytes: what Python's storages copy when
// they are saved.
std::optional<Geometry> elements_of_bytes(const at::Tensor& tensor) {
  if (tensor.scalar_type() != at::kByte || tensor.dim() != 1) return std::nullopt;
  ir::Storage& storage = storage_of(impl_of(tensor));
  std::lock_guard lock(storage.mutex());
  const Geometry& base = storage.base();
  const auto nbytes = static_cast<int64_t>(storage.nbytes());
  if (base.dtype == at::kByte || base.offset != 0 || base.nbytes() != nbytes ||
      !(geometry_of(impl_of(tensor)) == Geometry::contiguous(at::kByte, {nbytes}))) {
    return std::nullopt;
  }
  return base;
}

void copy_to_host(const at::Tensor& self, const at::Tensor& from) {
  check_has_data(from, "a copy to the CPU");
  if (lands_in_rows(self, from)) {
    // As elements they are read as they are; a program would have to make bytes of them.
    if (const auto elements = elements_of_bytes(from)) {
      copy_to_host(at::from_blob(self.mutable_data_ptr(), elements->sizes, elements->strides,
                                 at::TensorOptions(elements->dtype)),
                   at::Tensor(view(from, *elements)));
      return;
    }
  }
  at::Tensor source = readable(from);
  Data data = computed_here(source);
  if (data.leaf && has_base_geometry(source, data.base) && lands_in_rows(self, source)) {
    graph::download(data.leaf, self.mutable_data_ptr());
  } else {
    self.copy_(to_host(source));
  }
}

void copy_between_devices(const at::Tensor& self, const at::Tensor& source) {
  at::Tensor local = empty_like_contiguous(source, self.scalar_type(), source.device().index());
  assign(local, source);
  Data data = computed_here(local);
  c10::DeviceIndex target = self.device().index();
  at::Tensor staged = empty_like_contiguous(source, self.scalar_type(), target);
  if (data.leaf) {
    set_leaf(staged, graph::copy_to_device(data.leaf, target));
  }
  assign(self, staged.expand(self.sizes()));
}

// Copies all bytes of a memory to new memory, which then has the same elements, spread alike: what
// Python's storages do when they are cloned, and so deepcopy(). False if it is something else.
bool copy_memory(const at::Tensor& self, const at::Tensor& source) {
  if (self.scalar_type() != at::kByte || source.scalar_type() != at::kByte) return false;
  ir::Storage &to = storage_of(impl_of(self)), &from = storage_of(impl_of(source));
  const auto is_whole_memory = [](const at::Tensor& bytes, const ir::Storage& memory) {
    return bytes.dim() == 1 && static_cast<size_t>(bytes.numel()) == memory.nbytes() &&
           bytes.is_contiguous() && bytes.storage_offset() == 0;
  };
  if (to.nbytes() != from.nbytes() || !is_whole_memory(self, to) ||
      !is_whole_memory(source, from)) {
    return false;
  }
  ir::PendingSet& pending = record::pending_set(self.device().index());
  ir::Garbage garbage;
  std::lock_guard lock(ir::device_mutex(pending.device));
  if (to.value() || to.sharding() || !from.value()) return false;
  record::take_over_pending(from, pending);
  to.set_value(from.value(), from.base(), pending, garbage);
  to.set_sharding(from.sharding());
  return true;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  if (from.is_same(self)) return self;
  auto shape = at::infer_size_dimvector(self.sizes(), from.sizes());
  TORCH_CHECK(self.sizes() == c10::IntArrayRef(shape), "output with shape ", self.sizes(),
              " doesn't match the broadcast shape ", c10::IntArrayRef(shape));
  at::assert_no_internal_overlap(self);
  if (from.device() == self.device()) at::assert_no_partial_overlap(self, from);
  if (self.numel() == 0) return self;
  if (self.device().type() != kDeviceType) {
    copy_to_host(self, from);
  } else if (from.device().type() != kDeviceType) {
    TORCH_CHECK(from.device().is_cpu(), "lazyxla: cannot copy from ", from.device(), " to ",
                self.device());
    copy_from_host(self, from, non_blocking);
  } else {
    warn_of_lost_parts(self, from);
    if (from.device() != self.device()) {
      copy_between_devices(self, from);
    } else if (!copy_memory(self, from)) {
      assign(self, from.expand(self.sizes()));
    }
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  at::Tensor result = target;
  copy_(result, self, non_blocking);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (target.sizes() != self.sizes()) {
    target.resize_(self.sizes());
    // The order in memory is the kernel's, too.
    if (self.is_non_overlapping_and_dense()) {
      impl_of(target).set_sizes_and_strides(self.sizes(), self.strides());
    }
  }
  return copy_from(self, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  return to_host(self, ".item() or a condition").item();
}

bool equal(const at::Tensor& self, const at::Tensor& other) {
  TORCH_CHECK(self.device() == other.device(),
              "Cannot compare two tensors on different devices. Got: ", self.device(), " and ",
              other.device());
  if (self.sizes() != other.sizes()) return false;
  return self.numel() == 0 || at::eq(self, other).all().item<bool>();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("equal", TORCH_FN(equal));
}

}  // namespace

void check_has_data(const at::Tensor& tensor, const char* reader) {
  ir::Storage& storage = storage_of(impl_of(tensor));
  bool capturing = record::Capture::current() != nullptr;
  {
    std::lock_guard lock(storage.mutex());
    const Value& value = storage.value();
    if (!value) return;
    if (!value.node->is_leaf() && !capturing) return;
    if (value.node->is_leaf() && !program::buffer_of(*value.node.get()).is_abstract()) return;
  }
  TORCH_CHECK(false, "lazyxla.aot: ", user_line_prefix(), "the value of a tensor (",
              tensor.scalar_type(), tensor.sizes(), ") was asked for, by ", reader,
              ", but it was recorded for a program that is compiled without being run: it has no "
              "value");
}

at::Tensor empty_like_contiguous(const at::Tensor& tensor, c10::ScalarType dtype,
                                 c10::DeviceIndex device) {
  Geometry g = Geometry::contiguous(dtype, tensor.sizes());
  return at::Tensor(make_tensor(dtype, g.sizes, g.strides, device));
}

void set_leaf(const at::Tensor& target, Value leaf) {
  ir::Garbage garbage;
  ir::PendingSet& pending = record::pending_set(target.device().index());
  std::lock_guard lock(ir::device_mutex(pending.device));
  write(impl_of(target), std::move(leaf), pending, garbage);
}

namespace {

// The content once it is not pending.
Data flushed(const at::Tensor& tensor) {
  ir::Storage& storage = storage_of(impl_of(tensor));
  ir::PendingSet& pending = record::pending_set(tensor.device().index());
  while (true) {
    Geometry base;
    bool mine;
    {
      std::lock_guard lock(storage.mutex());
      if (!storage.is_pending()) return {storage.value(), storage.base()};
      record::take_over_pending(storage, pending);
      mine = storage.pending_set() == &pending;
      base = storage.base();
    }
    if (mine) {
      record::flush(pending.device, record::Cause::kRead);
      continue;
    }
    // It belongs to a region that another thread is within: compute a value of our own.
    at::Tensor copy(make_tensor(base, static_cast<size_t>(base.nbytes()), pending.device));
    {
      ir::Garbage garbage;
      std::lock_guard lock(storage.mutex());
      if (!storage.is_pending() || !(storage.base() == base)) continue;
      storage_of(impl_of(copy)).set_value(storage.value(), base, pending, garbage);
    }
    return flushed(copy);
  }
}

}  // namespace

Data computed(const at::Tensor& tensor) {
  Data data = flushed(tensor);
  graph::await_enqueued(data.leaf, tensor.device().index());
  return data;
}

Data computed_here(const at::Tensor& tensor) {
  Data data = computed(tensor);
  if (!ir::Mesh::any() || !data.leaf) return data;
  program::DeviceBuffer& buffer = program::buffer_of(*data.leaf.node.get());
  if (buffer.is_abstract()) return data;
  buffer.await_sharding();
  const ir::Sharding* sharding = buffer.sharding();
  if (!sharding || program::holds_all(*sharding)) return data;
  const c10::DeviceIndex device = tensor.device().index();
  at::Tensor copy(make_tensor(data.base, static_cast<size_t>(data.base.nbytes()), device));
  {
    const auto* everywhere = ir::Sharding::replicated(sharding->mesh(), sharding->rank());
    ir::Garbage garbage;
    std::lock_guard lock(ir::device_mutex(device));
    storage_of(impl_of(copy))
        .set_value(constrain(data.leaf, *everywhere), data.base, record::pending_set(device),
                   garbage);
  }
  return computed(copy);
}

at::Tensor contiguous_copy(const at::Tensor& tensor) {
  at::Tensor copy = empty_like_contiguous(tensor, tensor.scalar_type(), tensor.device().index());
  assign(copy, tensor);
  return copy;
}

at::Tensor snapshot(const at::Tensor& tensor) {
  const c10::DeviceIndex device = tensor.device().index();
  at::Tensor copy = empty_like_contiguous(tensor, tensor.scalar_type(), device);
  {
    ir::PendingSet& pending = record::pending_set(device);
    std::lock_guard lock(ir::device_mutex(device));
    if (take_over(impl_of(copy), impl_of(tensor), pending)) return copy;
  }
  assign(copy, tensor);
  return copy;
}

at::Tensor to_host(const at::Tensor& tensor, const char* reader) {
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(c10::DeviceType::CPU);
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), options);
  check_has_data(tensor, reader);
  at::Tensor source = readable(tensor);
  Data data = computed_here(source);
  if (!data.leaf) return at::zeros(tensor.sizes(), options);
  if (!has_base_geometry(source, data.base) && !read_whole(source, data.base)) {
    return to_host(source, reader);  // another thread gave the storage another base meanwhile
  }
  at::Tensor host = at::empty(data.base.sizes, options.dtype(data.base.dtype));
  graph::download(data.leaf, host.mutable_data_ptr());
  if (has_base_geometry(source, data.base)) return host;
  // Lay the data out as the storage does, then view it as the tensor does.
  at::Tensor memory = at::empty_strided(data.base.sizes, data.base.strides, host.options());
  memory.copy_(host);
  return memory.as_strided(source.sizes(), source.strides(), source.storage_offset()).contiguous();
}

}  // namespace lazyxla::dispatch
