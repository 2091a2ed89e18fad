// Tensors of the device and of the host on the same memory, where the device is the host.
//
// Both sides see the memory's content as it is now, and neither may write to it. A write to the
// device's tensor uses other memory, since a storage's content is never changed but replaced (see
// ir/storage.h); PyTorch cannot prevent writes to the host's tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace lazyxla::dispatch {

// A CPU tensor of the same sizes on the device's memory. Flushes and waits. A tensor whose strides
// are not those of its memory's rows is copied on the device first. Throws NotImplementedError if
// the device's memory is not the host's.
at::Tensor host_view(const at::Tensor& tensor);

// A tensor of the device on a CPU tensor's memory, of the same sizes and strides; the memory lives
// as long as it is needed. Memory that the device cannot use, for example with gaps between the
// elements, is copied.
at::Tensor share_host(const at::Tensor& host, c10::DeviceIndex device);

// Lends a tensor's memory, in rows, to the library that shares our client (pjrt/shared_client.h),
// and takes such memory of that library's.
void lend(const at::Tensor& tensor, const std::function<void()>& take);
at::Tensor borrow(c10::ScalarType dtype, const std::vector<int64_t>& sizes,
                  const std::function<void()>& ask);

}  // namespace lazyxla::dispatch
