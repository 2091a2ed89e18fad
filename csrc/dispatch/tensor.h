// Tensors of the lazyxla device: plain TensorImpls on an ir::Storage.
//
// Reading a tensor gives the IR value of its elements; writing one gives its storage a new value.
// Both go through the tensor's geometry, so views need nothing else: see ir/geometry.h.
#pragma once

#include <ATen/core/TensorBase.h>

#include <vector>

#include "ir/storage.h"

namespace lazyxla::dispatch {

inline bool is_lazy(const c10::TensorImpl& tensor) {
  return tensor.device_type() == c10::DeviceType::PrivateUse1;
}

// The tensor's storage; throws if the tensor has none (a subclass without memory).
ir::Storage& storage_of(const c10::TensorImpl& tensor);

ir::Geometry geometry_of(const c10::TensorImpl& tensor);

// A handle of the tensor, which lives at least as long.
at::TensorBase tensor_of(const c10::TensorImpl& tensor);

// Whether a geometry covers the storage: each element of it once.
bool covers(const ir::Geometry& geometry, const ir::Storage& storage);

// Whether the tensor is its storage's whole content, unchanged: reading or writing it is reading or
// replacing the value. Caller holds the mutex.
bool is_whole(const c10::TensorImpl& tensor);

// The tensor's elements as a value of its sizes and dtype. `pending` is the calling thread's set
// (record/recording.h), which takes over what is pending elsewhere. Caller holds the mutex.
ir::Value read(const c10::TensorImpl& tensor, ir::PendingSet& pending);
ir::Value read(ir::Storage& storage, const ir::Geometry& geometry, ir::PendingSet& pending);

// Makes `value` (of the tensor's sizes and dtype) the tensor's content, which is pending in
// `pending` if the value is no leaf. Caller holds the mutex and drops `garbage` after releasing it.
void write(const c10::TensorImpl& tensor, ir::Value value, ir::PendingSet& pending,
           ir::Garbage& garbage);
void write(ir::Storage& storage, const ir::Geometry& geometry, ir::Value value,
           ir::PendingSet& pending, ir::Garbage& garbage);

// Gives a new contiguous tensor of the source's sizes and dtype the content of the source's memory,
// unchanged, in any base geometry. False unless the source is all of its memory, row by row. Caller
// holds the mutex.
bool take_over(const c10::TensorImpl& fresh, const c10::TensorImpl& source,
               ir::PendingSet& pending);

// The elements of `value`, row by row, in another shape.
ir::Value reshape(ir::Value value, c10::IntArrayRef sizes);

// `value` converted to another element type; itself if it has it already.
ir::Value cast(ir::Value value, c10::ScalarType dtype);

// `value` spread over devices as the sharding says.
ir::Value constrain(ir::Value value, const ir::Sharding& sharding);

// A new tensor without content.
at::TensorBase make_tensor(c10::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                           c10::DeviceIndex device);
// The same of a dense geometry whose bytes are known.
at::TensorBase make_tensor(const ir::Geometry& dense, size_t nbytes, c10::DeviceIndex device);
// Another tensor on the same memory.
at::TensorBase view(const at::TensorBase& base, const ir::Geometry& geometry);

}  // namespace lazyxla::dispatch
