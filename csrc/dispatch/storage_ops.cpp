#include "dispatch/storage_ops.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_copy_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/as_strided_scatter_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DefaultDtype.h>
#include <torch/library.h>

#include "dispatch/device_state.h"
#include "dispatch/tensor.h"
#include "program/buffer.h"
#include "record/recording.h"

namespace lazyxla::dispatch {
namespace {

using OptDtype = std::optional<c10::ScalarType>;
using OptLayout = std::optional<c10::Layout>;
using OptDevice = std::optional<c10::Device>;

// The element type of a new tensor, which XLA must have.
c10::ScalarType element_type(OptDtype dtype) {
  c10::ScalarType type = c10::dtype_or_default(dtype);
  program::pjrt_type(type);
  return type;
}

c10::DeviceIndex target_device(OptDevice device, OptLayout layout, std::optional<bool> pin) {
  TORCH_CHECK_NOT_IMPLEMENTED(c10::layout_or_default(layout) == c10::Layout::Strided,
                              "lazyxla: tensors of layout ", c10::layout_or_default(layout),
                              " do not exist on this device");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  return resolve_index(device ? device->index() : c10::DeviceIndex{-1});
}

// Whether unwritten memory is filled, so that every run reads the same.
bool fills_memory() {
  return at::globalContext().deterministicAlgorithms() &&
         at::globalContext().deterministicFillUninitializedMemory();
}

at::Tensor uninitialized(at::TensorBase made) {
  at::Tensor tensor(std::move(made));
  if (fills_memory()) at::native::fill_empty_deterministic_(tensor);
  return tensor;
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, OptDtype dtype,
                         OptLayout layout, OptDevice device, std::optional<bool> pin) {
  at::detail::check_size_nonnegative(sizes);
  return uninitialized(
      make_tensor(element_type(dtype), sizes, strides, target_device(device, layout, pin)));
}

at::Tensor empty(c10::IntArrayRef sizes, OptDtype dtype, OptLayout layout, OptDevice device,
                 std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  at::detail::check_size_nonnegative(sizes);
  const auto geometry = ir::Geometry::contiguous(element_type(dtype), sizes);
  const at::TensorBase made = make_tensor(geometry.dtype, geometry.sizes, geometry.strides,
                                          target_device(device, layout, pin));
  // It checks the number of dimensions.
  if (format) made.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return uninitialized(made);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef sizes,
                          std::optional<c10::MemoryFormat> format) {
  c10::TensorImpl& impl = *self.unsafeGetTensorImpl();
  if (self.sizes() != sizes) {
    at::detail::check_size_nonnegative(sizes);  // before anything changes
    const size_t needed = at::detail::computeStorageNbytesContiguous(sizes, self.element_size(),
                                                                     self.storage_offset());
    const auto nbytes = static_cast<int64_t>(storage_of(impl).nbytes());
    reserve_storage(impl, needed);
    impl.set_sizes_contiguous(sizes);
    if (fills_memory()) at::native::fill_resize_deterministic_(self, nbytes);
  }
  if (format) {
    TORCH_CHECK(*format != c10::MemoryFormat::Preserve, "Unsupported memory format", *format);
    impl.empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset,
                        c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  ir::Geometry geometry = ir::Geometry::contiguous(self.scalar_type(), sizes);
  if (!strides.empty()) geometry.strides.assign(strides.begin(), strides.end());
  geometry.offset = offset;
  TORCH_CHECK(source.device() == self.device(),
              "Attempted to set the storage of a tensor on device \"", self.device(),
              "\" to a storage on different device \"", source.device(),
              "\".  This is no longer allowed; the devices must match.");
  // That of a subclass which wraps tensors has no memory, only a size.
  if (source.allocator() != ir::allocator() && source.data() == nullptr) {
    return at::native::set_storage_cpu_(self, source, geometry.offset, geometry.sizes,
                                        geometry.strides);
  }
  auto& storage = ir::Storage::of(*source.unsafeGetStorageImpl());
  size_t needed = at::detail::computeStorageNbytes(geometry.sizes, geometry.strides,
                                                   self.element_size(), geometry.offset);
  if (storage.nbytes() < needed) resize_storage(storage, needed);
  at::native::set_storage_cpu_(self, source, geometry.offset, geometry.sizes, geometry.strides);
  // A storage filled as raw bytes (a checkpoint being loaded) takes the shape of its first typed
  // tensor, so that later reads are not reinterpretations.
  ir::Garbage garbage;
  ir::PendingSet& pending = record::pending_set(self.device().index());
  std::lock_guard lock(storage.mutex());
  bool typed = storage.base().dtype != c10::ScalarType::Byte;
  if (storage.value() && !typed && covers(geometry, storage) &&
      geometry.dtype != c10::ScalarType::Byte) {
    storage.set_value(read(storage, geometry, pending), geometry, pending, garbage);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto size = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, size, {});
}

at::Tensor& set_empty(at::Tensor& self) {
  at::Tensor none(make_tensor(self.scalar_type(), {0}, {1}, self.device().index()));
  return at::native::set_tensor_(self, none);
}

// PyTorch's zero of forward-mode derivatives, which its kernels for such tensors leave out of
// products and sums: a tangent that is not there gives no nan where it would meet an infinity. To
// what reads it, it has memory, which takes none until then.
at::Tensor efficient_zero_tensor(c10::IntArrayRef sizes, OptDtype dtype, OptLayout layout,
                                 OptDevice device, std::optional<bool> pin) {
  const at::Tensor zeros = at::zeros(sizes, dtype, layout, device, pin);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(zeros.storage()),
      c10::DispatchKeySet({c10::DispatchKey::PrivateUse1, c10::DispatchKey::ZeroTensor}),
      zeros.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(zeros.sizes(), zeros.strides());
  return result;
}

void record_stream(at::Tensor&, c10::Stream) {}  // one stream: nothing to keep apart

// Whether `param.data = other` may change the device: as for the other dense devices, so that
// Module.to keeps its Parameter objects, their ties, and the optimizer that holds them.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  auto is_plain = [](const at::Tensor& tensor) {
    return tensor.layout() == c10::Layout::Strided && !tensor.is_nested() &&
           (tensor.is_cpu() || tensor.device().type() == kDeviceType);
  };
  return is_plain(self) && is_plain(from);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(has_compatible_shallow_copy_type));
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_", TORCH_FN(set_empty));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  // Their strides are those of the argument's memory, which a recorded operator does not know.
  m.impl("as_strided_copy", TORCH_FN(at::native::as_strided_copy_symint));
  m.impl("as_strided_scatter", TORCH_FN(at::native::as_strided_scatter_symint));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("is_set_to", TORCH_FN(at::native::is_set_to));
  m.impl("_efficientzerotensor", TORCH_FN(efficient_zero_tensor));
  m.impl("record_stream", TORCH_FN(record_stream));
}

}  // namespace

void resize_storage(ir::Storage& storage, size_t nbytes) {
  ir::Garbage garbage;
  ir::PendingSet& pending = record::pending_set(storage.device().index());
  std::lock_guard lock(storage.mutex());
  size_t old_nbytes = storage.nbytes();
  if (old_nbytes == nbytes) return;
  const ir::Geometry old_base = storage.base();
  size_t item = c10::elementSize(old_base.dtype);
  c10::ScalarType dtype =
      nbytes % item || old_nbytes % item ? c10::ScalarType::Byte : old_base.dtype;
  item = c10::elementSize(dtype);
  auto base = ir::Geometry::contiguous(dtype, {static_cast<int64_t>(nbytes / item)});
  auto kept =
      ir::Geometry::contiguous(dtype, {static_cast<int64_t>(std::min(nbytes, old_nbytes) / item)});
  ir::Value content = storage.value() && kept.numel() ? read(storage, kept, pending) : ir::Value();
  storage.set_nbytes(nbytes);
  storage.set_sharding(nullptr);
  storage.set_value({}, base, pending, garbage);
  if (content) write(storage, kept, std::move(content), pending, garbage);
}

void reserve_storage(c10::TensorImpl& tensor, size_t nbytes) {
  ir::Storage& storage = storage_of(tensor);
  if (storage.nbytes() < nbytes) resize_storage(storage, nbytes);
}

}  // namespace lazyxla::dispatch
