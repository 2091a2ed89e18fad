#include "dispatch/dlpack.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>

#include "dispatch/copies.h"
#include "dispatch/device_state.h"
#include "dispatch/tensor.h"
#include "graph/aliasing.h"

namespace lazyxla::dispatch {
namespace {

// Whether the tensor's strides count elements of its storage's base in row-major order.
bool addresses_rows(const at::Tensor& tensor, const ir::Geometry& base) {
  if (tensor.is_conj() || tensor.is_neg() || tensor.scalar_type() != base.dtype) return false;
  auto rows = ir::Geometry::contiguous(base.dtype, base.sizes);
  return ir::same_layout(base.sizes, base.strides, rows.sizes, rows.strides);
}

// The dimensions from the most major to the most minor one.
std::vector<int64_t> dims_by_stride(const at::Tensor& tensor) {
  std::vector<int64_t> order(tensor.dim());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&tensor](int64_t a, int64_t b) { return tensor.stride(a) > tensor.stride(b); });
  return order;
}

}  // namespace

at::Tensor host_view(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.device().type() == kDeviceType,
                    "lazyxla: expected a tensor on a lazyxla device, got one on ", tensor.device());
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(c10::DeviceType::CPU);
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), options);
  check_has_data(tensor, "host_view");
  Data data = computed(tensor);
  if (!data.leaf) return at::zeros(tensor.sizes(), options);
  if (!addresses_rows(tensor, data.base)) return host_view(contiguous_copy(tensor));
  graph::Memory memory = graph::memory_of(data.leaf);
  auto keep = [owner = std::move(memory.owner)](void*) mutable { owner.reset(); };
  at::Tensor whole =
      at::from_blob(const_cast<void*>(memory.data), data.base.sizes, std::move(keep), options);
  return whole.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

at::Tensor share_host(const at::Tensor& host, c10::DeviceIndex device) {
  TORCH_CHECK_VALUE(host.is_cpu(), "lazyxla: expected a tensor on the CPU, got one on ",
                    host.device());
  const bool plain = !host.is_conj() && !host.is_neg();
  if (!plain || host.numel() == 0 || !ir::is_dense(host.sizes(), host.strides())) {
    return host.detach().to(c10::Device(kDeviceType, device));
  }
  at::Tensor rows = host.detach().permute(dims_by_stride(host));
  ir::TensorType type{rows.scalar_type(), {rows.sizes().begin(), rows.sizes().end()}};
  at::Tensor result = empty_like_contiguous(rows, rows.scalar_type(), device);
  set_leaf(result, graph::share(rows.const_data_ptr(), type, device, [rows]() {}));
  return result.as_strided(host.sizes(), host.strides());
}

void lend(const at::Tensor& tensor, const std::function<void()>& take) {
  check_has_data(tensor, "to_jax");
  const Data data = computed(tensor);
  const auto rows = ir::Geometry::contiguous(tensor.scalar_type(), tensor.sizes());
  const bool is_whole = data.leaf && data.base == rows && tensor.is_contiguous() &&
                        !tensor.is_conj() && !tensor.is_neg();
  if (is_whole) return graph::lend(data.leaf, take);
  const at::Tensor copy = contiguous_copy(tensor);
  graph::lend(computed(copy).leaf, take);
}

at::Tensor borrow(c10::ScalarType dtype, const std::vector<int64_t>& sizes,
                  const std::function<void()>& ask) {
  const ir::TensorType type{dtype, {sizes.begin(), sizes.end()}};
  auto [leaf, device] = graph::borrow(type, ask);
  const auto rows = ir::Geometry::contiguous(dtype, sizes);
  at::Tensor result(dispatch::make_tensor(rows, rows.nbytes(), device));
  set_leaf(result, std::move(leaf));
  return result;
}

}  // namespace lazyxla::dispatch
