// native_batch_norm writes its running statistics without saying so in its schema. It is routed to
// the _native_batch_norm_legit operators, which say so and are recorded like any other.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_native_batch_norm_legit.h>
#include <ATen/ops/_native_batch_norm_legit_no_training.h>
#include <torch/library.h>

namespace lazyxla::dispatch {
namespace {

using OptTensor = std::optional<at::Tensor>;

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const OptTensor& weight, const OptTensor& bias,
    const OptTensor& running_mean, const OptTensor& running_var, bool training, double momentum,
    double eps) {
  const bool has_stats = running_mean && running_mean->defined();
  TORCH_CHECK_VALUE(has_stats == (running_var && running_var->defined()),
                    "running_mean and running_var must either both be None or neither be None");
  if (!training && has_stats) {
    return at::_native_batch_norm_legit_no_training(input, weight, bias, *running_mean,
                                                    *running_var, momentum, eps);
  }
  if (!has_stats) return at::_native_batch_norm_legit(input, weight, bias, training, momentum, eps);
  at::Tensor mean = *running_mean, var = *running_var;
  return at::_native_batch_norm_legit(input, weight, bias, mean, var, training, momentum, eps);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("native_batch_norm", TORCH_FN(batch_norm)); }

}  // namespace
}  // namespace lazyxla::dispatch
