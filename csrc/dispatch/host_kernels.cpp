// Kernels for host programs (host_program.h) and host calls (host_call.h), for operators that
// PyTorch's CPU has none for: its own composition is recorded as one operator on other devices, or
// lazyxla has an operator of its own. Each has the operator's name and schema, in a namespace of
// their own.
#include <ATen/Functions.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <torch/library.h>

#include <algorithm>
#include <array>

namespace lazyxla::dispatch {
namespace {

using at::Tensor;
using OptTensor = std::optional<Tensor>;

Tensor wide(const Tensor& x) { return x.to(at::toOpMathType(x.scalar_type())); }

Tensor wide_or_undefined(const OptTensor& x) { return x && x->defined() ? wide(*x) : Tensor(); }

// ---- linear ----

std::tuple<Tensor, Tensor, Tensor> linear_backward(const Tensor& input, const Tensor& grad,
                                                   const Tensor& weight, std::array<bool, 3> mask) {
  const Tensor rows = input.reshape({-1, input.size(-1)});
  const Tensor grads = grad.reshape({-1, grad.size(-1)});
  return {mask[0] ? at::mm(grads, weight).view(input.sizes()) : Tensor(),
          mask[1] ? at::mm(grads.t(), rows) : Tensor(), mask[2] ? grads.sum(0) : Tensor()};
}

// ---- writes ----

// XLA's operation of this name, in place: the block at `starts`, which are clamped to fit.
Tensor& dynamic_update_slice(Tensor& x, const Tensor& update, at::TensorList starts) {
  Tensor block = x;
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    const int64_t size = update.size(dim);
    const int64_t start = starts[dim].item<int64_t>();
    block = block.narrow(dim, std::clamp<int64_t>(start, 0, x.size(dim) - size), size);
  }
  block.copy_(update);
  return x;
}

// ---- cross entropy ----

struct Targets {
  Tensor counted;  // which are not ignored
  Tensor safe;     // classes, 0 for ignored ones
  Tensor weights;  // 0 for ignored ones

  Targets(const Tensor& x, const Tensor& target, const OptTensor& weight, int64_t ignore_index)
      : counted(target.ne(ignore_index)), safe(at::where(counted, target, 0)) {
    const Tensor given = wide_or_undefined(weight);
    weights = given.defined() ? given.index_select(0, safe.flatten()).view(target.sizes())
                              : at::ones(target.sizes(), x.options());
    weights = at::where(counted, weights, 0);
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy(const Tensor& input, const Tensor& target,
                                                         const OptTensor& weight, int64_t reduction,
                                                         int64_t ignore_index) {
  const Tensor x = wide(input);
  const Targets targets(x, target, weight, ignore_index);
  const Tensor maximum = x.amax(1), log_sum = (x - maximum.unsqueeze(1)).exp_().sum(1).log_();
  const Tensor picked = x.gather(1, targets.safe.unsqueeze(1)).squeeze(1);
  const Tensor losses =
      at::where(targets.counted, (maximum - picked + log_sum) * targets.weights, 0);
  const Tensor total = targets.weights.sum();
  Tensor loss = reduction == at::Reduction::None ? losses : losses.sum();
  if (reduction == at::Reduction::Mean) loss = loss / total;
  return {loss.to(input.scalar_type()), maximum, log_sum, total};
}

Tensor cross_entropy_backward(const Tensor& grad, const Tensor& input, const Tensor& target,
                              const OptTensor& weight, int64_t reduction, int64_t ignore_index,
                              const Tensor& maximum, const Tensor& log_sum,
                              const Tensor& total_weight) {
  const Tensor x = wide(input);
  const Targets targets(x, target, weight, ignore_index);
  Tensor of_losses = wide(grad);
  if (reduction == at::Reduction::Mean) of_losses = of_losses / total_weight;
  const Tensor each =
      at::where(targets.counted, targets.weights * of_losses, 0).unsqueeze(1);  // 0 / 0 if none is
  Tensor gradient = (x - maximum.unsqueeze(1) - log_sum.unsqueeze(1)).exp_().mul_(each);
  gradient.scatter_add_(1, targets.safe.unsqueeze(1), each.neg());
  return gradient.to(input.scalar_type());
}

// ---- the cells of recurrent networks, as lazyxla/lowering/rules/recurrent.py defines them ----

std::vector<Tensor> gates_of(const Tensor& product, const OptTensor& bias, int64_t count) {
  const Tensor given = wide_or_undefined(bias);
  const Tensor gates = wide(product);
  return (given.defined() ? gates + given : gates).chunk(count, -1);
}

Tensor sigmoid_slope(const Tensor& y) { return y * (1 - y); }
Tensor tanh_slope(const Tensor& y) { return 1 - y * y; }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                             const Tensor& cx, const OptTensor& input_bias,
                                             const OptTensor& hidden_bias) {
  const Tensor sum = wide(input_gates) + wide(hidden_gates);
  const Tensor bias = wide_or_undefined(input_bias);
  const auto gates = gates_of(bias.defined() ? sum + bias : sum, hidden_bias, 4);
  const Tensor i = gates[0].sigmoid(), f = gates[1].sigmoid();
  const Tensor g = gates[2].tanh(), o = gates[3].sigmoid();
  const Tensor cy = f * wide(cx) + i * g;
  const auto dtype = input_gates.scalar_type();
  return {(o * cy.tanh()).to(dtype), cy.to(dtype), at::cat({i, f, g, o}, -1).to(dtype)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const OptTensor& grad_hy,
                                                      const OptTensor& grad_cy, const Tensor& cx,
                                                      const Tensor& cy, const Tensor& workspace,
                                                      bool has_bias) {
  const auto gates = wide(workspace).chunk(4, -1);
  const Tensor &i = gates[0], &f = gates[1], &g = gates[2], &o = gates[3];
  const Tensor grad_h = wide_or_undefined(grad_hy);
  Tensor grad_c = wide_or_undefined(grad_cy), grad_o = at::zeros_like(o);
  if (grad_h.defined()) {
    const Tensor squashed = wide(cy).tanh();
    grad_o = grad_h * squashed * sigmoid_slope(o);
    const Tensor through = grad_h * o * tanh_slope(squashed);
    grad_c = grad_c.defined() ? grad_c + through : through;
  }
  if (!grad_c.defined()) return {};
  const Tensor grads = at::cat({grad_c * g * sigmoid_slope(i), grad_c * wide(cx) * sigmoid_slope(f),
                                grad_c * i * tanh_slope(g), grad_o},
                               -1);
  const auto dtype = workspace.scalar_type();
  return {grads.to(dtype), (grad_c * f).to(dtype), has_bias ? grads.sum(0).to(dtype) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                    const Tensor& hx, const OptTensor& input_bias,
                                    const OptTensor& hidden_bias) {
  const auto input = gates_of(input_gates, input_bias, 3);
  const auto hidden = gates_of(hidden_gates, hidden_bias, 3);
  const Tensor h = wide(hx);
  const Tensor r = (input[0] + hidden[0]).sigmoid(), z = (input[1] + hidden[1]).sigmoid();
  const Tensor n = (input[2] + r * hidden[2]).tanh();
  const auto dtype = input_gates.scalar_type();
  return {(n + z * (h - n)).to(dtype), at::cat({r, z, n, h, hidden[2]}, -1).to(dtype)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy,
                                                                     const Tensor& workspace,
                                                                     bool has_bias) {
  const Tensor grad = wide(grad_hy);
  const auto saved = wide(workspace).chunk(5, -1);
  const Tensor &r = saved[0], &z = saved[1], &n = saved[2], &hx = saved[3], &hidden_n = saved[4];
  const Tensor grad_n = grad * (1 - z) * tanh_slope(n);
  const Tensor grad_z = grad * (hx - n) * sigmoid_slope(z);
  const Tensor grad_r = grad_n * hidden_n * sigmoid_slope(r);
  const auto dtype = workspace.scalar_type();
  const Tensor input = at::cat({grad_r, grad_z, grad_n}, -1);
  const Tensor hidden = at::cat({grad_r, grad_z, grad_n * r}, -1);
  return {input.to(dtype), hidden.to(dtype), (grad * z).to(dtype),
          has_bias ? input.sum(0).to(dtype) : Tensor(),
          has_bias ? hidden.sum(0).to(dtype) : Tensor()};
}

// ---- eigenvalues ----

// PyTorch's kernel hands LAPACK any numbers: nan ends the process there.
Tensor linalg_eigvals(const Tensor& x) {
  TORCH_CHECK(at::isfinite(x).all().item<bool>(),
              "torch.linalg.eigvals: input tensor should not contain infs or NaNs.");
  return at::_linalg_eigvals(x);
}

TORCH_LIBRARY_FRAGMENT(lazyxla_host, m) {
  m.def("_linalg_eigvals(Tensor self) -> Tensor", TORCH_FN(linalg_eigvals));
  m.def("linear_backward", TORCH_FN(linear_backward));
  m.def("dynamic_update_slice(Tensor(a!) x, Tensor update, Tensor[] starts) -> Tensor(a!)",
        TORCH_FN(dynamic_update_slice));
  m.def("cross_entropy", TORCH_FN(cross_entropy));
  m.def("cross_entropy_backward", TORCH_FN(cross_entropy_backward));
  m.def("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  m.def("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  m.def("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  m.def("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
}

}  // namespace
}  // namespace lazyxla::dispatch
