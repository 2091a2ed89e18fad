"""The operator of a recurrent layer's loop, its derivatives and its definition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lazyxla.jax.kernels import gradients_of

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Rows of a layer's weights for each hidden feature, by the name of the operator."""

_own = torch.library.Library("lazyxla", "FRAGMENT")
_own.define(
    "recurrent_layer(Tensor gates, Tensor hx, Tensor? cx, Tensor weight, Tensor? bias,"
    " Tensor? projection, Tensor? lengths, str cell, bool reverse, bool saves) -> Tensor[]"
)
_own.define(
    "recurrent_layer_backward(Tensor grad, Tensor grad_hy, Tensor? grad_cy, Tensor output,"
    " Tensor? cells, Tensor? workspace, Tensor hx, Tensor? cx, Tensor weight, Tensor? bias,"
    " Tensor? projection, Tensor? lengths, str cell, bool reverse) -> Tensor[]"
)


def run_layer(*args: Any) -> list[Tensor]:
    """The operator, or within transforms and with forward-mode derivatives, which it lacks, its
    definition."""
    is_transformed = (
        torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    )
    return reference(*args) if is_transformed else torch.ops.lazyxla.recurrent_layer(*args)


def results(
    gates: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None,
    lengths: Tensor | None,
    cell: str,
    reverse: bool,
    saves: bool,
) -> list[Tensor]:
    """The output (T, N, outputs), hy and, of an LSTM, cy. For the gradient an LSTM also gives its
    cells after each step, and an LSTM or GRU their cells' workspace.

    Args:
        gates: (T, N, gates * hidden), the inputs' part.
        hx: (N, outputs).
        cx: (N, hidden), an LSTM's.
        weight: (gates * hidden, outputs); `bias` its bias.
        projection: (outputs, hidden), if outputs are not the hidden features.
        lengths: int64 (N,): after so many steps a sequence has ended, and keeps its state.
        cell: a key of `GATES`.
        reverse: from the last step to the first.
        saves: whether a gradient follows.
    """
    steps = gates.shape[0]
    made = [hx.new_empty(steps, *hx.shape), torch.empty_like(hx)]
    if cx is not None:
        made.append(torch.empty_like(cx))
    if saves and cx is not None:
        made.append(cx.new_empty(steps, *cx.shape))
    if saves and cell in _WORKSPACES:
        made.append(hx.new_empty(steps, hx.shape[0], _WORKSPACES[cell] * _hidden(cell, weight)))
    return made


_WORKSPACES = {"lstm": 4, "gru": 5}
"""The size of a cell's workspace, in hidden features: PyTorch's fused cells have the same."""


def _hidden(cell: str, weight: Tensor) -> int:
    return weight.shape[0] // GATES[cell]


def _gradients(
    grad: Tensor,
    grad_hy: Tensor,
    grad_cy: Tensor | None,
    output: Tensor,
    cells: Tensor | None,
    workspace: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None,
    lengths: Tensor | None,
    cell: str,
    reverse: bool,
) -> list[Tensor]:
    """The gradients of gates, hx, weight and, as far as there are these, of cx, bias and
    projection."""
    gates = grad.new_empty(*grad.shape[:2], weight.shape[0])
    given = [hx, weight, *(t for t in (cx, bias, projection) if t is not None)]
    return [gates, *(t.new_empty(t.shape) for t in given)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, ctx.cell, ctx.reverse, _ = inputs
    ctx.count = len(output)
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    tensors = list(ctx.saved_tensors)
    inputs, outputs = tensors[: -ctx.count], tensors[-ctx.count :]
    grads = tuple(
        torch.zeros_like(t) if g is None else g for g, t in zip(gradients, outputs, strict=True)
    )
    # The gradient's own gradient, or a batch of gradients, is that of a loop in Python.
    if torch.is_grad_enabled() or any(map(torch._C._functorch.is_legacy_batchedtensor, grads)):
        arguments = (*inputs, ctx.cell, ctx.reverse, True)
        return gradients_of(reference, arguments, outputs, grads)
    _, hx, cx, weight, bias, projection, lengths = inputs
    is_lstm = cx is not None
    saved = outputs[3 if is_lstm else 2 :]
    cells = saved[0] if is_lstm else None
    workspace = saved[-1] if saved else None
    made = iter(
        torch.ops.lazyxla.recurrent_layer_backward(
            *(grads[0], grads[1], grads[2] if is_lstm else None),
            *(outputs[0], cells, workspace),
            *(hx, cx, weight, bias, projection, lengths),
            *(ctx.cell, ctx.reverse),
        )
    )
    of_gates, of_hx, of_weight = next(made), next(made), next(made)
    rest = [None if t is None else next(made) for t in (cx, bias, projection)]
    return of_gates, of_hx, rest[0], of_weight, *rest[1:], None, None, None, None


def reference(
    gates: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None,
    lengths: Tensor | None,
    cell: str,
    reverse: bool,
    saves: bool,
) -> list[Tensor]:
    """The definition, of operators with gradients of any order; its arguments are those of
    `results`."""
    h, c = hx, cx
    outputs, cells, workspaces = [], [], []
    new_c = None
    steps = range(gates.shape[0])
    for i in reversed(steps) if reverse else steps:
        of_hidden = F.linear(h, weight, bias)
        if c is not None:
            in_, forget, candidate, out = (gates[i] + of_hidden).chunk(4, 1)
            in_, forget, out = in_.sigmoid(), forget.sigmoid(), out.sigmoid()
            candidate = candidate.tanh()
            new_c = forget * c + in_ * candidate
            new_h = out * new_c.tanh()
            workspaces.append(torch.cat([in_, forget, candidate, out], 1))
            if projection is not None:
                new_h = F.linear(new_h, projection)
        elif cell == "gru":
            (r, z, n), (hidden_r, hidden_z, hidden_n) = gates[i].chunk(3, 1), of_hidden.chunk(3, 1)
            r, z = (r + hidden_r).sigmoid(), (z + hidden_z).sigmoid()
            n = (n + r * hidden_n).tanh()
            new_h = n + z * (h - n)
            workspaces.append(torch.cat([r, z, n, h, hidden_n], 1))
        else:
            total = gates[i] + of_hidden
            new_h = total.tanh() if cell == "rnn_tanh" else total.relu()
        if lengths is not None:
            runs = (i < lengths).unsqueeze(1)
            new_h = torch.where(runs, new_h, h)
            if c is not None and new_c is not None:
                new_c = torch.where(runs, new_c, c)
        h, c = new_h, new_c
        outputs.append(h)
        cells.append(c)

    def stacked(parts: list[Any]) -> Tensor:
        return torch.stack(parts[::-1] if reverse else parts)

    made = [stacked(outputs), h]
    if c is not None:
        made += [c, stacked(cells)]
    return [*made, *([stacked(workspaces)] if workspaces else [])]


torch.library.register_fake("lazyxla::recurrent_layer", results, lib=_own)
torch.library.register_fake("lazyxla::recurrent_layer_backward", _gradients, lib=_own)
torch.library.register_autograd(
    "lazyxla::recurrent_layer", _backward, setup_context=_save, lib=_own
)
