"""nn.LSTM, nn.GRU and nn.RNN: the steps of a layer are one loop in the program.

PyTorch calls a cell for each step. A program would have as many copies of the cell as the sequence
has steps, and each new length would take as long to compile.

Here a layer is two operators. The inputs' matmul, for all steps at once, is a linear layer;
``lazyxla::recurrent_layer`` is the loop over the steps. Its gradient is a loop in the opposite
direction; the gradients of the weights are one matmul over all steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.nn import functional as F

from lazyxla.recurrent import packing
from lazyxla.recurrent.layer import GATES, run_layer
from lazyxla.recurrent.packing import Packed, Padded
from lazyxla.runtime import BACKEND

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_aten = torch.library.Library("aten", "IMPL")


class _Weights(NamedTuple):
    """One layer's in one direction."""

    of_input: Tensor
    of_hidden: Tensor
    input_bias: Tensor | None = None
    hidden_bias: Tensor | None = None
    projection: Tensor | None = None


def install() -> None:
    """Registers the device's implementations. Once per process."""
    for name in GATES:
        for form, function in (("input", _of_batch), ("data", _of_packed_sequence)):
            op = getattr(getattr(torch.ops.aten, name), form)
            for key in ("AutogradPrivateUse1", "PrivateUse1"):
                _aten.impl(op, functools.partial(function, op, name), key)
    packing.install()


# ---- PyTorch's operators ----


def _of_batch(
    op: Any,
    cell: str,
    x: Tensor,
    states: Any,
    params: list[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """aten::lstm.input and its like, for `x` (T, N, features), or (N, T, features)."""
    options = (has_biases, layers, dropout, train, bidirectional)
    given = x.transpose(0, 1) if batch_first and x.dim() == 3 else x
    found = None
    if given.dim() == 3 and given.shape[0] > 1:
        found = _run(cell, given, states, params, Padded, given.shape[1], options)
    if found is None:
        return _as_torch_does(op, x, states, params, *options, batch_first)
    output, *states = found
    return output.transpose(0, 1) if batch_first else output, *states


def _of_packed_sequence(
    op: Any,
    cell: str,
    data: Tensor,
    batch_sizes: Tensor,
    states: Any,
    params: list[Tensor],
    *options: Any,
) -> tuple[Tensor, ...]:
    """aten::lstm.data and its like, for `data` (rows, features), as nn.utils.rnn packs it."""
    found = None
    if _is_plain([batch_sizes], "cpu") and batch_sizes.dim() == 1 and len(batch_sizes) > 1:
        layout = functools.partial(Packed.of, batch_sizes, data.device)
        if data.dim() == 2 and len(data) == int(batch_sizes.sum()):
            found = _run(cell, data, states, params, layout, int(batch_sizes[0]), options)
    if found is None:
        return _as_torch_does(op, data, batch_sizes, states, params, *options)
    return tuple(found)


def _as_torch_does(op: Any, *args: Any) -> tuple[Tensor, ...]:
    """One cell after the other; also raises PyTorch's errors."""
    return op._op_dk(DispatchKey.CompositeImplicitAutograd, *args)  # type: ignore[no-any-return]


def _run(
    cell: str,
    x: Tensor,
    states: Any,
    params: list[Tensor],
    layout: Callable[[], Padded | Packed],
    samples: int,
    options: tuple[bool, int, float, bool, bool],
) -> list[Tensor] | None:
    """The output and the last states; None for what PyTorch's implementation is for."""
    has_biases, layers, dropout, train, bidirectional = options
    directions = 2 if bidirectional else 1
    states = list(states) if cell == "lstm" else [states]
    tensors = _cast([x, *states, *params])
    if not _is_plain(tensors, BACKEND) or any(t.numel() == 0 or t.dim() == 0 for t in tensors):
        return None
    x, *rest = tensors
    states, params = rest[: len(states)], rest[len(states) :]
    weights = _split(params, has_biases, states)
    if len(weights) != layers * directions:
        return None
    if not _fit(cell, states, weights, samples):
        return None
    placed = layout()
    lasts = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            i = layer * directions + direction
            now = [s.select(0, i) for s in states]
            output, *last = _layer(cell, x, now, weights[i], placed, reverse=direction == 1)
            outputs.append(output)
            lasts.append(last)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout != 0 and train and layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    return [x, *(torch.stack(each) for each in zip(*lasts, strict=True))]


def _cast(tensors: list[Tensor]) -> list[Tensor]:
    """In autocast's dtype, where it is on: PyTorch lists the cells as of lower precision."""
    if not torch.is_autocast_enabled(BACKEND):
        return tensors
    dtype = torch.get_autocast_dtype(BACKEND)
    return [t.to(dtype) if t.dtype in _FLOATS[1:] else t for t in tensors]


def _is_plain(tensors: Sequence[Tensor], device: str) -> bool:
    """Whether all are ordinary tensors of one dtype on one device, and no mode sees operators."""
    first = tensors[0]
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and first.device.type == device
        and all(
            type(t) in (Tensor, torch.nn.Parameter)
            and t.device == first.device
            and t.dtype == first.dtype
            for t in tensors
        )
        and (first.dtype in _FLOATS or device == "cpu")
    )


def _split(params: list[Tensor], has_biases: bool, states: list[Tensor]) -> list[_Weights]:
    """Of each layer and direction."""
    has_projection = len(states) == 2 and states[0].shape[-1] != states[1].shape[-1]
    count = 2 + 2 * has_biases + has_projection
    parts = [params[i : i + count] for i in range(0, len(params), count)]
    if any(len(part) != count for part in parts):
        return []
    biases = slice(2, 4) if has_biases else slice(2, 2)
    nothing: list[Any] = [] if has_biases else [None, None]
    return [_Weights(*p[:2], *p[biases], *nothing, *p[2 + 2 * has_biases :]) for p in parts]


def _fit(cell: str, states: list[Tensor], weights: list[_Weights], samples: int) -> bool:
    """Whether the shapes are as PyTorch expects them, but for the inputs' features: of these the
    matmul with the weight raises PyTorch's error."""
    hidden, outputs = states[-1].shape[-1], states[0].shape[-1]
    rows = GATES[cell] * hidden
    for of_input, of_hidden, *biases, projection in weights:
        if of_input.dim() != 2 or (len(of_input), *of_hidden.shape) != (rows, rows, outputs):
            return False
        if any(bias is not None and bias.shape != (rows,) for bias in biases):
            return False
        if projection is not None and projection.shape != (outputs, hidden):
            return False
    expected = [(len(weights), samples, outputs)]
    if cell == "lstm":
        expected.append((len(weights), samples, hidden))
    return [tuple(s.shape) for s in states] == expected


def _layer(
    cell: str,
    x: Tensor,
    states: list[Tensor],
    weights: _Weights,
    layout: Padded | Packed,
    reverse: bool,
) -> list[Tensor]:
    """One layer in one direction: its output, laid out as x is, and the last states."""
    gates = layout.spread(F.linear(x, weights.of_input, weights.input_bias))
    _, weight, _, bias, projection = weights
    used = [t for t in (gates, *states, weight, bias, projection) if t is not None]
    saves = torch.is_grad_enabled() and any(t.requires_grad for t in used)
    hx, cx = states[0], states[1] if len(states) > 1 else None
    rest = (weight, bias, projection, layout.lengths, cell, reverse, saves)
    output, *made = run_layer(gates, hx, cx, *rest)
    return [layout.gathered(output), *made[: len(states)]]
