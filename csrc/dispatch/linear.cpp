// A linear layer is one node forward and one backward, where PyTorch would make ten operators of
// them: views, products and a sum. PyTorch has a formula for the gradient of aten::linear, which
// counts for a backend with a kernel of its own.
//
// Whoever looks at operators (a mode or tensor subclass such as FlopCounterMode, selective
// checkpointing, DTensor or a trace of torch.compile's) sees PyTorch's ten: they know no others.
// Forward-mode derivatives, which the formula has not, are taken through them, too.
#include <ATen/core/Tensor.h>
#include <ATen/ops/linear_native.h>
#include <torch/library.h>

#include "dispatch/plain_call.h"

namespace lazyxla::dispatch {
namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using OptTensor = std::optional<Tensor>;

Tensor linear(DispatchKeySet keys, const Tensor& input, const Tensor& weight,
              const OptTensor& bias) {
  if (!is_plain(keys) || weight.dim() != 2 || has_tangent(input) || has_tangent(weight) ||
      (bias && has_tangent(*bias))) {
    return at::native::linear(input, weight, bias);
  }
  // The kernel with the formula is the one of all keys of autograd where nothing else was
  // registered. Of these, nested tensors' is the one that has a kernel below it everywhere.
  static const auto op =
      operator_named<Tensor(const Tensor&, const Tensor&, const OptTensor&)>("aten::linear");
  const DispatchKeySet below = keys & c10::after_autograd_keyset;
  return op.redispatch(below.add(DispatchKey::AutogradNestedTensor), input, weight, bias);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("linear", TORCH_FN(linear)); }

}  // namespace
}  // namespace lazyxla::dispatch
