// Automatic mixed precision: torch.autocast("lazyxla") with PyTorch's own operator lists and cast
// policies. Operators in no list fall through.

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace lazyxla::dispatch {
namespace {

// A probability in half precision is too inexact for the logarithm: PyTorch forbids this operator
// under autocast on every device.
at::Tensor banned_binary_cross_entropy(const at::Tensor&, const at::Tensor&,
                                       const std::optional<at::Tensor>&, int64_t) {
  TORCH_CHECK(false,
              "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to "
              "autocast on lazyxla. Many models use a sigmoid right before the loss: combine the "
              "two with torch.nn.functional.binary_cross_entropy_with_logits or "
              "torch.nn.BCEWithLogitsLoss, which are safe to autocast, or compute the loss under "
              "torch.autocast(\"lazyxla\", enabled=False) on float32 tensors.");
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
// The policy is the last argument of the registration macro, after the operator (and overload).
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FLOAT32_OUTPUT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  using namespace at;  // the lists spell its names without it
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FLOAT32)
  FLOAT32(cross_entropy_loss)  // the list has what PyTorch decomposes it to
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT32_OUTPUT)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTE)
#undef LOWER_PRECISION
#undef FLOAT32
#undef FLOAT32_OUTPUT
#undef PROMOTE

  m.impl(TORCH_SELECTIVE_NAME("aten::binary_cross_entropy"), &banned_binary_cross_entropy);
}

}  // namespace
}  // namespace lazyxla::dispatch
