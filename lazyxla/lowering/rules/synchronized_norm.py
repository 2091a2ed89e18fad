"""The parts of batch normalization over several processes (`nn.SyncBatchNorm`).

Each process reduces its batch to a few numbers for each channel. `lazyxla/batch_norm.py` computes
with these numbers once they were exchanged; here are the passes over whole batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.formula import operands
from lazyxla.lowering.rules.normalization import channel_dims, of_channels, statistics
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


@rule("aten::batch_norm_stats")
def batch_norm_stats(b: Builder, x: Value, eps: Operand) -> tuple[Value, Value]:
    mean, _, rstd = statistics(x.accumulated(), channel_dims(x), eps)
    return mean.reshape([-1]), rstd.reshape([-1])


@rule("aten::batch_norm_elemt")
def batch_norm_elemt(
    b: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    rstd: Value,
    eps: Operand,
) -> Value:
    parameters = (None if p is None else of_channels(x, p) for p in (weight, bias, mean, rstd))
    x, weight, bias, mean, rstd = operands(b, x, *parameters)
    normalized = (x - mean) * rstd
    if weight is not None:
        normalized = normalized * weight
    return normalized if bias is None else normalized + bias


@rule("aten::batch_norm_backward_reduce")
def batch_norm_backward_reduce(
    b: Builder,
    grad: Value,
    x: Value,
    mean: Value,
    rstd: Value,
    weight: Value | None,
    wants_input: bool,
    wants_weight: bool,
    wants_bias: bool,
) -> tuple[Value | None, ...]:
    """sum(grad), sum(grad * (x - mean)), and the gradients of weight and bias."""
    grad, x, dims = grad.accumulated(), x.accumulated(), channel_dims(x)
    total = grad.sum(dims)
    along = (grad * (x - of_channels(x, mean))).sum(dims)
    return (
        total if wants_input else None,
        along if wants_input else None,
        along * rstd if wants_weight else None,
        total if wants_bias else None,
    )


@rule("aten::batch_norm_backward_elemt")
def batch_norm_backward_elemt(
    b: Builder,
    grad: Value,
    x: Value,
    mean: Value,
    rstd: Value,
    weight: Value | None,
    total: Value,
    along: Value,
    counts: Value,
) -> Value:
    """The input's gradient; `total` and `along` are the two sums, over all processes."""
    counts = counts.to(b.compute_dtype(mean.dtype))
    count = counts.sum(range(counts.rank))
    parameters = (
        None if p is None else of_channels(x, p) for p in (mean, rstd, weight, total, along)
    )
    grad, x, mean, rstd, weight, total, along, count = operands(b, grad, x, *parameters, count)
    grad_x = (grad - total / count - (x - mean) * rstd * rstd * along / count) * rstd
    return grad_x if weight is None else grad_x * weight
