// A linear layer is one node forward and one backward, where PyTorch would make ten operators of
// them: views, matmuls and a sum. PyTorch has a formula for the gradient of aten::linear, which
// counts for a backend with a kernel of its own.
//
// Code that inspects operators (a mode or tensor subclass such as FlopCounterMode, selective
// checkpointing, DTensor or a trace by torch.compile) sees PyTorch's ten: it knows no others.
// Forward-mode derivatives, which the formula lacks, are taken through them, too, as are complex
// numbers, which it does not conjugate, and a bias of another dtype: which inputs PyTorch refuses
// then depends on their strides.
#include <ATen/core/Tensor.h>
#include <ATen/ops/linear_native.h>
#include <torch/library.h>

#include "dispatch/plain_call.h"

namespace lazyxla::dispatch {
namespace {

using at::Tensor;
using c10::DispatchKeySet;
using OptTensor = std::optional<Tensor>;

Tensor linear(DispatchKeySet keys, const Tensor& input, const Tensor& weight,
              const OptTensor& bias) {
  if (!is_plain(keys) || weight.dim() != 2 || input.is_complex() || has_tangent(input) ||
      has_tangent(weight) || (bias && (has_tangent(*bias) || bias->dtype() != input.dtype()))) {
    return at::native::linear(input, weight, bias);
  }
  static const auto op =
      operator_named<Tensor(const Tensor&, const Tensor&, const OptTensor&)>("aten::linear");
  return op.redispatch(with_formula(keys), input, weight, bias);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("linear", TORCH_FN(linear)); }

}  // namespace
}  // namespace lazyxla::dispatch
