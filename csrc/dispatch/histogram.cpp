// histc without bounds counts between the least and the greatest element. PyTorch refuses bounds
// that are not finite, which only the elements show: they are read, as on every other device.
#include <ATen/core/Tensor.h>
#include <ATen/ops/aminmax.h>
#include <torch/library.h>

#include "common/counters.h"
#include "dispatch/recorder.h"
#include "record/capture.h"

namespace lazyxla::dispatch {
namespace {

void check_bounds(const at::Tensor& x) {
  auto [least, greatest] = at::aminmax(x);
  double low = least.item<double>(), high = greatest.item<double>();
  ++Counters::get().data_dependent;
  TORCH_CHECK(std::isfinite(low) && std::isfinite(high), "torch.histc: range of [", low, ", ", high,
              "] is not finite");
}

// Serves histc and histc.out.
void histc(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const OpInfo& info = OpInfo::of(op);
  auto args = torch::jit::last(*stack, info.args.size());
  const at::Tensor& x = args[0].toTensor();
  bool bounded = args[2].toScalar().toDouble() != args[3].toScalar().toDouble();
  bool readable = record::Capture::current() == nullptr;
  if (!bounded && readable && x.is_floating_point() && x.numel() > 0) check_bounds(x);
  record(info, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("histc", torch::CppFunction::makeFromBoxedFunction<&histc>());
  m.impl("histc.out", torch::CppFunction::makeFromBoxedFunction<&histc>());
}

}  // namespace
}  // namespace lazyxla::dispatch
