// The LU decomposition that det and slogdet keep for their gradients is that of the transposed
// matrix if the matrix is real and contiguous: PyTorch's kernels save a copy so, and the gradients'
// formulas ask for the strides again. A recorded operator has no strides. Its LU is that of the
// transposed matrix for all real ones; one that is not contiguous is recorded transposed, which
// changes no determinant.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_linalg_det.h>
#include <ATen/ops/_linalg_slogdet.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace lazyxla::dispatch {
namespace {

using at::Tensor;

Tensor to_record(const Tensor& a) { return a.is_complex() || a.is_contiguous() ? a : a.mT(); }

Tensor fresh(const Tensor& a, c10::ScalarType dtype) {
  return at::empty({0}, a.options().dtype(dtype));
}

// The out= forms are recorded; the functional ones call them.
std::tuple<Tensor, Tensor, Tensor> det(const Tensor& a) {
  Tensor result = fresh(a, a.scalar_type()), lu = fresh(a, a.scalar_type());
  Tensor pivots = fresh(a, c10::ScalarType::Int);
  at::_linalg_det_out(result, lu, pivots, to_record(a));
  return {result, lu, pivots};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> slogdet(const Tensor& a) {
  Tensor sign = fresh(a, a.scalar_type()), lu = fresh(a, a.scalar_type());
  Tensor logabsdet = fresh(a, c10::toRealValueType(a.scalar_type()));
  Tensor pivots = fresh(a, c10::ScalarType::Int);
  at::_linalg_slogdet_out(sign, logabsdet, lu, pivots, to_record(a));
  return {sign, logabsdet, lu, pivots};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_linalg_det", TORCH_FN(det));
  m.impl("_linalg_slogdet", TORCH_FN(slogdet));
}

}  // namespace
}  // namespace lazyxla::dispatch
