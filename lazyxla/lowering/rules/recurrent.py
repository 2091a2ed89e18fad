"""The fused cells that PyTorch's LSTM and GRU are made of on devices that are not the CPU.

Gates are given as the results of two matmuls that the caller has made, of the input and of the
hidden state with their weights, each (batch, gates * hidden). The workspace is private to a cell
and its backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lazyxla.lowering.functions import sigmoid, tanh
from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


def _split(x: Value, parts: int) -> list[Value]:
    """Equal parts along the last dimension."""
    size = x.shape[-1] // parts
    return [x.b.slice_dim(x, -1, i * size, (i + 1) * size) for i in range(parts)]


def _biased(x: Value, bias: Value | None) -> Value:
    return x if bias is None else x + bias.accumulated()


def _sigmoid_slope(y: Value) -> Value:
    """The derivative of the sigmoid where it is y."""
    return y * (1 - y)


def tanh_slope(y: Value) -> Value:
    """The derivative of tanh where it is y."""
    return 1 - y * y


@rule("aten::_thnn_fused_lstm_cell")
def lstm_cell(
    b: Builder,
    input_gates: Value,
    hidden_gates: Value,
    cx: Value,
    input_bias: Value | None,
    hidden_bias: Value | None,
) -> tuple[Value, ...]:
    """hy, cy and the workspace: the activated gates, in the order i, f, g, o."""
    gates = input_gates.accumulated() + hidden_gates.accumulated()
    i, f, g, o = _split(_biased(_biased(gates, input_bias), hidden_bias), 4)
    i, f, g, o = sigmoid(i), sigmoid(f), tanh(g), sigmoid(o)
    cy = f * cx.accumulated() + i * g
    return o * tanh(cy), cy, b.concat([i, f, g, o], -1)


@rule("aten::_thnn_fused_lstm_cell_backward_impl")
def lstm_cell_backward(
    b: Builder,
    grad_hy: Value | None,
    grad_cy: Value | None,
    cx: Value,
    cy: Value,
    workspace: Value,
    has_bias: bool,
) -> tuple[Value | None, ...]:
    """The gradients of the gates (both matmuls have the same), of cx and of a bias."""
    i, f, g, o = _split(workspace.accumulated(), 4)
    grad_c = None if grad_cy is None else grad_cy.accumulated()
    grad_o = o.full(0)
    if grad_hy is not None:
        grad_h, squashed = grad_hy.accumulated(), tanh(cy.accumulated())
        grad_o = grad_h * squashed * _sigmoid_slope(o)
        through = grad_h * o * tanh_slope(squashed)
        grad_c = through if grad_c is None else grad_c + through
    if grad_c is None:
        return None, None, None
    grad_i = grad_c * g * _sigmoid_slope(i)
    grad_f = grad_c * cx.accumulated() * _sigmoid_slope(f)
    grad_g = grad_c * i * tanh_slope(g)
    grads = b.concat([grad_i, grad_f, grad_g, grad_o], -1)
    return grads, grad_c * f, grads.sum([0]) if has_bias else None


@rule("aten::_thnn_fused_gru_cell")
def gru_cell(
    b: Builder,
    input_gates: Value,
    hidden_gates: Value,
    hx: Value,
    input_bias: Value | None,
    hidden_bias: Value | None,
) -> tuple[Value, Value]:
    """hy and the workspace (batch, 5 * hidden): r, z, n, hx and the hidden part of n's argument."""
    input_r, input_z, input_n = _split(_biased(input_gates.accumulated(), input_bias), 3)
    hidden_r, hidden_z, hidden_n = _split(_biased(hidden_gates.accumulated(), hidden_bias), 3)
    hx = hx.accumulated()
    r, z = sigmoid(input_r + hidden_r), sigmoid(input_z + hidden_z)
    n = tanh(input_n + r * hidden_n)
    return n + z * (hx - n), b.concat([r, z, n, hx, hidden_n], -1)


@rule("aten::_thnn_fused_gru_cell_backward")
def gru_cell_backward(
    b: Builder, grad_hy: Value, workspace: Value, has_bias: bool
) -> tuple[Value | None, ...]:
    """The gradients of both matmuls' results, of hx and of both biases."""
    grad = grad_hy.accumulated()
    r, z, n, hx, hidden_n = _split(workspace.accumulated(), 5)
    grad_n = grad * (1 - z) * tanh_slope(n)
    grad_z = grad * (hx - n) * _sigmoid_slope(z)
    grad_r = grad_n * hidden_n * _sigmoid_slope(r)
    grad_input = b.concat([grad_r, grad_z, grad_n], -1)
    grad_hidden = b.concat([grad_r, grad_z, grad_n * r], -1)
    biases = (g.sum([0]) if has_bias else None for g in (grad_input, grad_hidden))
    return grad_input, grad_hidden, grad * z, *biases
