"""The parts of batch normalization over several processes (`nn.SyncBatchNorm`).

Each process reduces its batch to a few numbers for each channel. What is computed of these numbers,
once they were exchanged, is `lazyxla/batch_norm.py`'s; here is what goes over whole batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.formula import operands
from lazyxla.lowering.rules.normalization import channel_dims, of_channels, statistics, wide
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


@rule("aten::batch_norm_stats")
def batch_norm_stats(b: Builder, x: Value, eps: Value) -> tuple[Value, Value]:
    (x,) = wide(b, x)
    mean, _, rstd = statistics(b, x, channel_dims(b, x), eps)
    return b.reshape(mean, [-1]), b.reshape(rstd, [-1])


@rule("aten::batch_norm_elemt")
def batch_norm_elemt(
    b: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    rstd: Value,
    eps: Value,
) -> Value:
    parameters = (of_channels(b, x, p) for p in (weight, bias, mean, rstd))
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
    grad, x, mean, rstd = wide(b, grad, x, mean, rstd)
    dims = channel_dims(b, x)
    deviation = b.hlo.subtract(x, b.broadcast_to(of_channels(b, x, mean), b.shape(x)))
    total = b.reduce(grad, dims, "sum")
    along = b.reduce(b.hlo.multiply(grad, deviation), dims, "sum")
    return (
        total if wants_input else None,
        along if wants_input else None,
        b.hlo.multiply(along, rstd) if wants_weight else None,
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
    (mean, counts) = wide(b, mean, counts)
    count = b.reduce(counts, range(b.rank(counts)), "sum")
    parameters = (of_channels(b, x, p) for p in (mean, rstd, weight, total, along))
    grad, x, mean, rstd, weight, total, along, count = operands(b, grad, x, *parameters, count)
    grad_x = (grad - total / count - (x - mean) * rstd * rstd * along / count) * rstd
    return grad_x if weight is None else grad_x * weight
