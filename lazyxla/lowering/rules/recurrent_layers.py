"""A layer of an LSTM, GRU or RNN: one loop over its steps, and one for its gradient.

Their operators are defined in lazyxla/recurrent.py, which says what the arguments are. States and
results have the tensors' dtype after each step, as PyTorch's cells have; gradients are carried from
step to step in the accumulation dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.functions import maximum, tanh, where
from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.recurrent import (
    gru_cell,
    gru_cell_backward,
    lstm_cell,
    lstm_cell_backward,
    tanh_slope,
)
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


@rule("lazyxla::recurrent_layer")
def recurrent_layer(
    b: Builder,
    gates: Value,
    hx: Value,
    cx: Value | None,
    weight: Value,
    bias: Value | None,
    projection: Value | None,
    lengths: Value | None,
    cell: str,
    reverse: bool,
    saves: bool,
) -> list[Value]:
    """The output, and the states after the last step; then what the gradient reads: the cells of an
    LSTM, and the workspaces."""
    states = [hx] if cx is None else [hx, cx]
    # Transposed once, before the loop.
    optional = [_transposed(weight), bias, _transposed(projection), lengths]

    def step(
        i: Value, before: list[Value], now: list[Value], fixed: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        weight, bias, projection, lengths = _given(fixed, optional)
        h = before[0]
        hidden_gates = b.dot(h, weight, [1], [0])
        new, workspace = _stepped(b, cell, now[0], hidden_gates, bias, before)
        if projection is not None:
            new[0] = b.dot(new[0].to(h.dtype), projection, [1], [0])
        new = [state.to(h.dtype) for state in new]
        if lengths is not None:
            runs = _runs(b, i, lengths)
            new = [where(runs, s, old) for s, old in zip(new, before, strict=True)]
        made = [*new, *(w.to(h.dtype) for w in workspace)] if saves else new[:1]
        return new, made

    outputs = [b.outputs[0], *b.outputs[1 + len(states) :]]
    slices = [(spec.dtype, spec.shape[1:]) for spec in outputs]
    fixed = _present(optional)
    last, stacks = b.scan(gates.shape[0], step, states, [gates], fixed, slices, reverse)
    return [stacks[0], *last, *stacks[1:]]


def _stepped(
    b: Builder,
    cell: str,
    gates: Value,
    hidden_gates: Value,
    bias: Value | None,
    states: list[Value],
) -> tuple[list[Value], list[Value]]:
    """A cell's new states (before a projection) and its workspace, if it has one."""
    if cell == "lstm":
        h, c, workspace = lstm_cell(b, gates, hidden_gates, states[1], None, bias)
        return [h, c], [workspace]
    if cell == "gru":
        h, workspace = gru_cell(b, gates, hidden_gates, states[0], None, bias)
        return [h], [workspace]
    total = gates.accumulated() + hidden_gates.accumulated()
    if bias is not None:
        total += bias.accumulated()
    return [tanh(total) if cell == "rnn_tanh" else maximum(total, 0)], []


@rule("lazyxla::recurrent_layer_backward")
def recurrent_layer_backward(
    b: Builder,
    grad: Value,
    grad_hy: Value,
    grad_cy: Value | None,
    output: Value,
    cells: Value | None,
    workspace: Value | None,
    hx: Value,
    cx: Value | None,
    weight: Value,
    bias: Value | None,
    projection: Value | None,
    lengths: Value | None,
    cell: str,
    reverse: bool,
) -> list[Value]:
    """The gradients of gates, hx, weight and, as far as there are these, of cx, bias and
    projection; `grad` is that of the output."""
    dtype = hx.dtype
    stacks = [grad, output, workspace, cells, _before(b, cx, cells, reverse)]
    optional = [weight, projection, lengths]

    def step(
        i: Value, after: list[Value], now: list[Value], fixed: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        weight, projection, lengths = _given(fixed, optional)
        grad, output, workspace, *cells = _given(now, stacks)
        after = [after[0] + grad.accumulated(), *after[1:]]
        of_h = of_output = after[0]
        if projection is not None:
            of_h = b.dot(of_output.to(dtype), projection, [1], [0])
        runs = None if lengths is None else _runs(b, i, lengths)

        def while_running(gradient: Value) -> Value:
            return gradient if runs is None else where(runs, gradient, 0)

        of_gates, before = _stepped_back(b, cell, output, workspace, cells, [of_h, *after[1:]])
        of_gates = [while_running(g).to(dtype) for g in of_gates]
        through_weight = b.dot(of_gates[-1], weight, [1], [0]).accumulated()
        before[0] = through_weight if before[0] is None else before[0] + through_weight
        if runs is not None:
            before = [where(runs, g, old) for g, old in zip(before, after, strict=True)]
        made = of_gates
        if projection is not None:
            made = [*of_gates, while_running(of_output).to(dtype)]
        return before, made

    last = [g.accumulated() for g in _present([grad_hy, grad_cy])]
    slices = [(dtype, b.outputs[0].shape[1:])] * (2 if cell == "gru" else 1)
    if projection is not None:
        slices.append((dtype, hx.shape))
    steps, xs, fixed = grad.shape[0], _present(stacks), _present(optional)
    first, made = b.scan(steps, step, last, xs, fixed, slices, not reverse)
    of_hidden = made[1] if cell == "gru" else made[0]
    outputs_before = _before(b, hx, output, reverse)
    results = [made[0], first[0], _of_weight(b, of_hidden, outputs_before), *first[1:]]
    if bias is not None:
        results.append(of_hidden.accumulated().sum([0, 1]))
    if projection is not None and cells is not None and workspace is not None:
        size = cells.shape[-1]
        out_gate = b.slice_dim(workspace, -1, 3 * size, 4 * size).accumulated()
        projected = (out_gate * tanh(cells.accumulated())).to(dtype)
        results.append(_of_weight(b, made[-1], projected))
    return [result.to(dtype) for result in results]


def _stepped_back(
    b: Builder, cell: str, output: Value, workspace: Any, cells: list[Any], grads: list[Value]
) -> tuple[list[Value], list[Any]]:
    """The gradients of a cell's gates, of the input's and, where they differ, of the hidden ones;
    and those of the states before, without what comes through the weight (None: nothing else).

    Args:
        cells: of an LSTM, after the step and before it.
        grads: of the states after the step.
    """
    found: Any
    if cell == "lstm":
        found = lstm_cell_backward(b, grads[0], grads[1], cells[1], cells[0], workspace, False)
        return [found[0]], [None, found[1]]
    if cell == "gru":
        found = gru_cell_backward(b, grads[0], workspace, False)
        return [*found[:2]], [found[2]]
    y = output.accumulated()
    grad = grads[0] * tanh_slope(y) if cell == "rnn_tanh" else where(y > 0, grads[0], 0)
    return [grad], [None]


def _of_weight(b: Builder, grad: Value, x: Value) -> Value:
    """The gradient of a weight that `x` (T, N, columns) is multiplied by, from that of the products
    (T, N, rows)."""
    grad, x = (v.reshape([v.shape[0] * v.shape[1], v.shape[2]]) for v in (grad, x))
    return b.dot(grad, x, [0], [0])


def _before(b: Builder, first: Any, states: Any, reverse: bool) -> Any:
    """The states before each step (T, N, features), from the first one and those after each; None
    if there are none."""
    if first is None:
        return None
    first, steps = b.unsqueeze(first, 0), states.shape[0]
    if reverse:
        return b.concat([b.slice_dim(states, 0, 1, steps), first], 0)
    return b.concat([first, b.slice_dim(states, 0, 0, steps - 1)], 0)


def _runs(b: Builder, i: Value, lengths: Value) -> Value:
    """Whether each sequence has a step i: (N, 1)."""
    return b.unsqueeze(i.to(torch.int64) < lengths, 1)


def _transposed(weight: Any) -> Any:
    return None if weight is None else weight.b.transpose(weight, [1, 0])


def _present(values: Sequence[Value | None]) -> list[Value]:
    return [v for v in values if v is not None]


def _given(values: Sequence[Value], optional: Sequence[Value | None]) -> list[Any]:
    """The values in the places of those that are there."""
    left = iter(values)
    return [None if each is None else next(left) for each in optional]
