// The cells of an LSTM and a GRU. On devices that are not the CPU PyTorch makes one operator of a
// cell, whose formula for the gradient is of real numbers and has no forward-mode derivative. What
// the formula lacks is computed by the operators that PyTorch calls on the CPU.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <torch/library.h>

#include <tuple>

#include "dispatch/plain_call.h"

namespace lazyxla::dispatch {
namespace {

using at::Tensor;
using c10::DispatchKeySet;
using OptTensor = std::optional<Tensor>;

bool is_dual(const Tensor& x) { return has_tangent(x); }
bool is_dual(const OptTensor& x) { return x && has_tangent(*x); }

template <typename... Tensors>
bool lacks_formula(const Tensor& gates, const Tensors&... others) {
  return gates.is_complex() || has_tangent(gates) || (is_dual(others) || ...);
}

Tensor biased(const Tensor& gates, const OptTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(DispatchKeySet keys, const Tensor& input_gates,
                                             const Tensor& hidden_gates, const Tensor& cx,
                                             const OptTensor& input_bias,
                                             const OptTensor& hidden_bias) {
  if (!lacks_formula(input_gates, hidden_gates, cx, input_bias, hidden_bias)) {
    static const auto op = operator_named<std::tuple<Tensor, Tensor, Tensor>(
        const Tensor&, const Tensor&, const Tensor&, const OptTensor&, const OptTensor&)>(
        "aten::_thnn_fused_lstm_cell");
    return op.redispatch(with_formula(keys), input_gates, hidden_gates, cx, input_bias,
                         hidden_bias);
  }
  const Tensor sums = biased(input_gates, input_bias) + biased(hidden_gates, hidden_bias);
  const auto gates = sums.chunk(4, 1);
  const Tensor i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh();
  const Tensor o = gates[3].sigmoid();
  const Tensor cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}

std::tuple<Tensor, Tensor> gru_cell(DispatchKeySet keys, const Tensor& input_gates,
                                    const Tensor& hidden_gates, const Tensor& hx,
                                    const OptTensor& input_bias, const OptTensor& hidden_bias) {
  if (!lacks_formula(input_gates, hidden_gates, hx, input_bias, hidden_bias)) {
    static const auto op = operator_named<std::tuple<Tensor, Tensor>(
        const Tensor&, const Tensor&, const Tensor&, const OptTensor&, const OptTensor&)>(
        "aten::_thnn_fused_gru_cell");
    return op.redispatch(with_formula(keys), input_gates, hidden_gates, hx, input_bias,
                         hidden_bias);
  }
  const auto input = biased(input_gates, input_bias).chunk(3, 1);
  const auto hidden = biased(hidden_gates, hidden_bias).chunk(3, 1);
  const Tensor r = (input[0] + hidden[0]).sigmoid(), z = (input[1] + hidden[1]).sigmoid();
  const Tensor n = (input[2] + r * hidden[2]).tanh();
  return {n + z * (hx - n), at::cat({r, z, n, hx, hidden[2]}, 1)};
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
}

}  // namespace
}  // namespace lazyxla::dispatch
