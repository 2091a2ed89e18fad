// Copies of lists of tensors. Within a device they are one operator like any other on lists; if one
// of the tensors is elsewhere, it is a copy each, as on PyTorch's other devices.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy_native.h>
#include <torch/library.h>

#include <algorithm>

#include "dispatch/recorder.h"

namespace lazyxla::dispatch {
namespace {

void foreach_copy(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const OpInfo& info = OpInfo::of(op);
  const auto args = torch::jit::last(*stack, info.args.size());
  const std::vector<at::Tensor> targets = args[0].toTensorVector();
  const std::vector<at::Tensor> sources = args[1].toTensorVector();
  const auto is_here = [&](const at::Tensor& x) { return x.device() == targets[0].device(); };
  if (std::ranges::all_of(targets, is_here) && std::ranges::all_of(sources, is_here)) {
    return record(info, stack);
  }
  at::native::foreach_tensor_copy_list_kernel_slow_(targets, sources, args[2].toBool());
  torch::jit::drop(*stack, info.args.size());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_foreach_copy_", torch::CppFunction::makeFromBoxedFunction<&foreach_copy>());
}

}  // namespace
}  // namespace lazyxla::dispatch
