// Copies: between dtypes and geometries of a device, between devices, and to and from the host.
//
// A copy on one device computes nothing by itself: the target's storage gets the source's value.
// Data that leaves for the host is what makes a program run: reading flushes.
#pragma once

#include <ATen/core/Tensor.h>

namespace lazyxla::dispatch {

// The tensor's elements on the host, contiguous. Flushes and waits. `reader` is who asks, for the
// error that a tensor without data (graph/capture.h) makes.
at::Tensor to_host(const at::Tensor& tensor, const char* reader = "a copy to the CPU");

}  // namespace lazyxla::dispatch
