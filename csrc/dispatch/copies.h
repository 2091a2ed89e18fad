// Copies: between dtypes and geometries of a device, between devices, and to and from the host.
//
// A copy on one device computes nothing by itself: the target's storage gets the source's value. A
// copy to the host runs a program: reading flushes.
#pragma once

#include <ATen/core/Tensor.h>

#include "ir/storage.h"

namespace lazyxla::dispatch {

// The data of a tensor's storage, computed, together with its base geometry.
struct Data {
  ir::Value leaf;  // null: uninitialised memory
  ir::Geometry base;
};

// Throws, before anything is flushed, if the tensor was recorded in a capture (record/capture.h):
// it has no data and gets none. `reader` names the caller in the message.
void check_has_data(const at::Tensor& tensor, const char* reader);

// Flushes until the tensor's storage holds data; another thread may write in between.
Data computed(const at::Tensor& tensor);

// The same, with all of the data on this process's devices: data of which other processes hold a
// part is copied to all of them, which the other processes must do, too.
Data computed_here(const at::Tensor& tensor);

// Sets the content of a contiguous tensor on its own memory.
void set_leaf(const at::Tensor& target, ir::Value leaf);

// A copy of the tensor's elements on the same device, contiguous; recorded only.
at::Tensor contiguous_copy(const at::Tensor& tensor);

// The tensor's elements as they are now, on memory of their own. For a reshaped tensor this runs no
// operator, as the snapshot has the base geometry of the tensor's memory. Use it for what is read
// once, not for what is kept: programs would differ by that geometry.
at::Tensor snapshot(const at::Tensor& tensor);

at::Tensor empty_like_contiguous(const at::Tensor& tensor, c10::ScalarType dtype,
                                 c10::DeviceIndex device);

// The tensor's elements on the host, contiguous. Flushes and waits; `reader` as above.
at::Tensor to_host(const at::Tensor& tensor, const char* reader = "a copy to the CPU");

}  // namespace lazyxla::dispatch
