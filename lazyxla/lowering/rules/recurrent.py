"""The fused cells that PyTorch's LSTM and GRU are made of on devices that are not the CPU.

Gates come in as two products that the caller has made, of the input and of the hidden state with
their weights, each (batch, gates * hidden). The workspace is private to a cell and its backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


def _split(b: Builder, x: Value, parts: int) -> list[Value]:
    """Equal parts along the last dimension."""
    size = b.shape(x)[-1] // parts
    return [b.slice_dim(x, -1, i * size, (i + 1) * size) for i in range(parts)]


def _wide(b: Builder, *xs: Value | None) -> list[Value | None]:
    return [None if x is None else b.convert(x, b.compute_dtype(b.dtype(x))) for x in xs]


def _add(b: Builder, *xs: Value | None) -> Value:
    """The sum of what is there; biases are broadcast."""
    total, *rest = [x for x in xs if x is not None]
    for x in rest:
        total = b.hlo.add(total, b.broadcast_to(x, b.shape(total)))
    return total


def _less_square(b: Builder, x: Value) -> Value:
    """1 - x * x, the derivative of tanh where it is x."""
    return b.hlo.subtract(b.full_like(x, 1), b.hlo.multiply(x, x))


def _less_self(b: Builder, x: Value) -> Value:
    """x * (1 - x), the derivative of the logistic function where it is x."""
    return b.hlo.multiply(x, b.hlo.subtract(b.full_like(x, 1), x))


def _product(b: Builder, *xs: Value) -> Value:
    total, *rest = xs
    for x in rest:
        total = b.hlo.multiply(total, x)
    return total


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
    gates = _add(b, *_wide(b, input_gates, hidden_gates, input_bias, hidden_bias))
    (cx,) = _wide(b, cx)
    i, f, g, o = _split(b, gates, 4)
    i, f, o = (b.hlo.logistic(gate) for gate in (i, f, o))
    g = b.hlo.tanh(g)
    cy = _add(b, _product(b, f, cx), _product(b, i, g))
    return _product(b, o, b.hlo.tanh(cy)), cy, b.concat([i, f, g, o], -1)


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
    """The gradients of the gates (both products have the same), of cx and of a bias."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    grad_hy, grad_cy, cx, cy, workspace = _wide(b, grad_hy, grad_cy, cx, cy, workspace)
    i, f, g, o = _split(b, workspace, 4)
    squashed = b.hlo.tanh(cy)
    through = None
    grad_o = b.full_like(o, 0)
    if grad_hy is not None:
        through = _product(b, grad_hy, o, _less_square(b, squashed))
        grad_o = _product(b, grad_hy, squashed, _less_self(b, o))
    grad_c = _add(b, grad_cy, through)
    grads = b.concat(
        [
            _product(b, grad_c, g, _less_self(b, i)),
            _product(b, grad_c, cx, _less_self(b, f)),
            _product(b, grad_c, i, _less_square(b, g)),
            grad_o,
        ],
        -1,
    )
    return grads, _product(b, grad_c, f), b.reduce(grads, [0], "sum") if has_bias else None


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
    input_gates, hidden_gates, hx = _wide(b, input_gates, hidden_gates, hx)
    ir, iz, inew = _split(b, _add(b, input_gates, *_wide(b, input_bias)), 3)
    hr, hz, hnew = _split(b, _add(b, hidden_gates, *_wide(b, hidden_bias)), 3)
    r, z = b.hlo.logistic(_add(b, ir, hr)), b.hlo.logistic(_add(b, iz, hz))
    n = b.hlo.tanh(_add(b, inew, _product(b, r, hnew)))
    hy = _add(b, n, _product(b, z, b.hlo.subtract(hx, n)))
    return hy, b.concat([r, z, n, hx, hnew], -1)


@rule("aten::_thnn_fused_gru_cell_backward")
def gru_cell_backward(
    b: Builder, grad_hy: Value, workspace: Value, has_bias: bool
) -> tuple[Value | None, ...]:
    """The gradients of both products, of hx and of both biases."""
    grad_hy, workspace = _wide(b, grad_hy, workspace)
    r, z, n, hx, hnew = _split(b, workspace, 5)
    keep = b.hlo.subtract(b.full_like(z, 1), z)
    grad_n = _product(b, grad_hy, keep, _less_square(b, n))
    grad_z = _product(b, grad_hy, b.hlo.subtract(hx, n), _less_self(b, z))
    grad_r = _product(b, grad_n, hnew, _less_self(b, r))
    grad_input = b.concat([grad_r, grad_z, grad_n], -1)
    grad_hidden = b.concat([grad_r, grad_z, _product(b, grad_n, r)], -1)
    grads: Sequence[Value | None] = [grad_input, grad_hidden, _product(b, grad_hy, z)]
    biases = [b.reduce(g, [0], "sum") if has_bias else None for g in grads[:2]]
    return *grads, *biases
