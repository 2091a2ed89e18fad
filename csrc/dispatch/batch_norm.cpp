// native_batch_norm writes its running statistics without saying so in its schema. It is routed to
// the _native_batch_norm_legit operators, which say so and are recorded like any other. The out=
// forms have running statistics and results to write to: they assign the results of the functional
// ones.
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
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

using Outputs = std::tuple<at::Tensor&, at::Tensor&, at::Tensor&>;

Outputs assign(const std::tuple<at::Tensor, at::Tensor, at::Tensor>& results, Outputs outputs) {
  auto assign_one = [](const at::Tensor& result, at::Tensor& output) {
    at::native::resize_output(output, result.sizes());
    output.copy_(result);
  };
  assign_one(std::get<0>(results), std::get<0>(outputs));
  assign_one(std::get<1>(results), std::get<1>(outputs));
  assign_one(std::get<2>(results), std::get<2>(outputs));
  return outputs;
}

Outputs native_batch_norm_out(const at::Tensor& input, const OptTensor& weight,
                              const OptTensor& bias, const OptTensor& running_mean,
                              const OptTensor& running_var, bool training, double momentum,
                              double eps, at::Tensor& out, at::Tensor& save_mean,
                              at::Tensor& save_invstd) {
  return assign(
      native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps),
      {out, save_mean, save_invstd});
}

Outputs native_batch_norm_legit_out(const at::Tensor& input, const OptTensor& weight,
                                    const OptTensor& bias, at::Tensor& running_mean,
                                    at::Tensor& running_var, bool training, double momentum,
                                    double eps, at::Tensor& out, at::Tensor& save_mean,
                                    at::Tensor& save_invstd) {
  return assign(at::_native_batch_norm_legit(input, weight, bias, running_mean, running_var,
                                             training, momentum, eps),
                {out, save_mean, save_invstd});
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_batch_norm", TORCH_FN(batch_norm));
  m.impl("native_batch_norm.out", TORCH_FN(native_batch_norm_out));
  m.impl("_native_batch_norm_legit.out", TORCH_FN(native_batch_norm_legit_out));
}

}  // namespace
}  // namespace lazyxla::dispatch
