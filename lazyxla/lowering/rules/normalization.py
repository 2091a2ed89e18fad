"""Batch, layer, group, RMS and weight normalization, and their gradients.

Everything is computed in float32 for narrower floats. With xhat = (x - mean) * rstd, all of the
gradients are
    grad_x = rstd * (g - mean(g) - xhat * mean(g * xhat)),  g = grad * weight,
where the means run over what shares one mean and rstd; RMS normalization has no mean(g).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.functions import rsqrt, sqrt
from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


def statistics(x: Value, dims: Sequence[int], eps: Operand) -> tuple[Value, Value, Value]:
    """Mean, sum of squared deviations and 1 / sqrt(variance + eps) over `dims`, which are kept."""
    mean = x.mean(dims, keepdim=True)
    deviation = x - mean
    squares = (deviation * deviation).sum(dims, keepdim=True)
    return mean, squares, rsqrt(squares / x.count(dims) + eps)


def _affine(x: Value, weight: Value | None, bias: Value | None = None) -> Value:
    """x * weight + bias."""
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _grad_input(
    g: Value, xhat: Value, rstd: Value, dims: Sequence[int], centered: bool = True
) -> Value:
    """The gradient of the module's formula; `g` is already multiplied by the weight."""
    rest = g - xhat * (g * xhat).mean(dims, keepdim=True)
    return (rest - g.mean(dims, keepdim=True) if centered else rest) * rstd


# ---- batch normalization: statistics of each channel (dimension 1) ----


def of_channels(x: Value, parameter: Value) -> Value:
    """A value of shape (C,) in the shape (1, C, 1, ...) that broadcasts to `x`."""
    return parameter.reshape([1, -1] + [1] * (x.rank - 2))


def channel_dims(x: Value) -> list[int]:
    return [0, *range(2, x.rank)]


def _affine_channels(x: Value, weight: Value | None, bias: Value | None = None) -> Value:
    parameters = (None if p is None else of_channels(x, p) for p in (weight, bias))
    return _affine(x, *parameters)


def _train(
    x: Value, weight: Value | None, bias: Value | None, eps: Operand
) -> tuple[Value, Value, Value, Value]:
    """The normalized input; and mean, rstd and unbiased variance, each of shape (C,)."""
    x, dims = x.accumulated(), channel_dims(x)
    mean, squares, rstd = statistics(x, dims, eps)
    out = _affine_channels((x - mean) * rstd, weight, bias)
    variance = squares / (x.count(dims) - 1)
    return out, mean.reshape([-1]), rstd.reshape([-1]), variance.reshape([-1])


def _evaluate(
    b: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    variance: Value,
    eps: Operand,
) -> tuple[Value, Value, Value]:
    """The input normalized by known statistics; and what is saved: mean and rstd, or nothing."""
    x = x.accumulated()
    mean, rstd = mean.to(x.dtype), rsqrt(variance.to(x.dtype) + eps)
    out = (x - of_channels(x, mean)) * of_channels(x, rstd)
    out = _affine_channels(out, weight, bias)
    if b.outputs[1].shape == (0,):
        mean = rstd = b.zeros((0,), x.dtype)
    return out, mean, rstd


def _moving(old: Value, new: Value, momentum: Operand) -> Value:
    """(1 - momentum) * old + momentum * new."""
    new = new.accumulated()
    factor = new.full(momentum)
    return old.to(new.dtype) * (1 - factor) + new * factor


@rule("aten::_native_batch_norm_legit.no_stats")
def batch_norm_no_stats(
    b: Builder, x: Value, weight: Any, bias: Any, training: bool, momentum: Operand, eps: Operand
) -> tuple[Value, ...]:
    return _train(x, weight, bias, eps)[:3]


@rule("aten::_native_batch_norm_legit_functional")
def batch_norm_functional(
    b: Builder,
    x: Value,
    weight: Any,
    bias: Any,
    mean: Value,
    variance: Value,
    training: bool,
    momentum: Operand,
    eps: Operand,
) -> tuple[Value, ...]:
    if not training:
        return *_evaluate(b, x, weight, bias, mean, variance, eps), mean, variance
    *results, batch_variance = _train(x, weight, bias, eps)
    mean = _moving(mean, results[1], momentum)
    return *results, mean, _moving(variance, batch_variance, momentum)


@rule("aten::_native_batch_norm_legit_no_training")
def batch_norm_no_training(
    b: Builder,
    x: Value,
    weight: Any,
    bias: Any,
    mean: Value,
    variance: Value,
    momentum: Operand,
    eps: Operand,
) -> tuple[Value, ...]:
    return _evaluate(b, x, weight, bias, mean, variance, eps)


@rule("aten::_batch_norm_with_update_functional")
def batch_norm_with_update(
    b: Builder,
    x: Value,
    weight: Any,
    bias: Any,
    mean: Value,
    variance: Value,
    momentum: Operand,
    eps: Operand,
) -> tuple[Value, ...]:
    out, save_mean, save_rstd, mean, variance = batch_norm_functional(
        b, x, weight, bias, mean, variance, True, momentum, eps
    )
    return out, save_mean, save_rstd, _reserve(b), mean, variance


@rule("aten::_batch_norm_no_update")
def batch_norm_no_update(
    b: Builder,
    x: Value,
    weight: Any,
    bias: Any,
    mean: Value | None,
    variance: Value | None,
    momentum: Operand,
    eps: Operand,
) -> tuple[Value, ...]:
    if mean is None or variance is None:
        return *_train(x, weight, bias, eps)[:3], _reserve(b)
    return *_evaluate(b, x, weight, bias, mean, variance, eps), _reserve(b)


def _reserve(b: Builder) -> Value:
    """The reserved space of cuDNN's kernels, which nothing here reads."""
    return b.zeros(b.outputs[3].shape, torch.uint8)


@rule("aten::native_batch_norm_backward")
def batch_norm_backward(
    b: Builder,
    grad: Value,
    x: Value,
    weight: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    save_mean: Value | None,
    save_rstd: Value | None,
    train: bool,
    eps: Operand,
    output_mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    x, grad = x.accumulated(), grad.to(b.compute_dtype(x.dtype))
    if train:
        mean, rstd = save_mean, save_rstd
    else:
        assert running_var is not None
        mean, rstd = running_mean, rsqrt(running_var.to(x.dtype) + eps)
    assert mean is not None
    assert rstd is not None
    mean, rstd = of_channels(x, mean), of_channels(x, rstd)
    dims = channel_dims(x)
    xhat = (x - mean) * rstd
    # The weight is the same for all that a sum adds: the gradients share both sums.
    products, total = (v.sum(dims, keepdim=True) for v in (grad * xhat, grad))
    grad_x = grad
    if train:
        count = x.count(dims)
        grad_x = grad - xhat * (products / count) - total / count
    grad_x = _affine_channels(grad_x * rstd, weight)
    grads = grad_x, products.reshape([-1]), total.reshape([-1])
    # PyTorch's meta function makes the input's, whether it is wanted or not.
    wanted = (True, *output_mask[1:])
    return tuple(g if w else None for g, w in zip(grads, wanted, strict=True))


@rule("aten::batch_norm_backward")
def batch_norm_backward_reserved(b: Builder, *args: Any) -> tuple[Value | None, ...]:
    return batch_norm_backward(b, *args[:-1])


# ---- layer and RMS normalization: statistics over the trailing dimensions ----


def _inner(x: Value, normalized: Sequence[int]) -> list[int]:
    return list(range(x.rank - len(normalized), x.rank))


def _outer(x: Value, normalized: Sequence[int]) -> list[int]:
    return list(range(x.rank - len(normalized)))


@rule("aten::native_layer_norm")
def layer_norm(
    b: Builder,
    x: Value,
    normalized: Sequence[int],
    weight: Value | None,
    bias: Value | None,
    eps: Operand,
) -> tuple[Value, ...]:
    x = x.accumulated()
    mean, _, rstd = statistics(x, _inner(x, normalized), eps)
    return _affine((x - mean) * rstd, weight, bias), mean, rstd


@rule("aten::native_layer_norm_backward")
def layer_norm_backward(
    b: Builder,
    grad: Value,
    x: Value,
    normalized: Sequence[int],
    mean: Value,
    rstd: Value,
    weight: Value | None,
    bias: Value | None,
    output_mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    x, grad = x.accumulated(), grad.accumulated()
    xhat, outer = (x - mean) * rstd, _outer(x, normalized)
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        grad_x = _grad_input(_affine(grad, weight), xhat, rstd, _inner(x, normalized))
    if output_mask[1] and weight is not None:
        grad_weight = (grad * xhat).sum(outer)
    if output_mask[2] and bias is not None:
        grad_bias = grad.sum(outer)
    return grad_x, grad_weight, grad_bias


@rule("aten::_fused_rms_norm")
def rms_norm(
    b: Builder, x: Value, normalized: Sequence[int], weight: Value | None, eps: Operand | None
) -> tuple[Value, Value]:
    x = x.accumulated()
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    rstd = rsqrt((x * x).mean(_inner(x, normalized), keepdim=True) + eps)
    return _affine(x * rstd, weight), rstd


@rule("aten::_fused_rms_norm_backward")
def rms_norm_backward(
    b: Builder,
    grad: Value,
    x: Value,
    normalized: Sequence[int],
    rstd: Value,
    weight: Value | None,
    output_mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    x, grad = x.accumulated(), grad.accumulated()
    xhat = x * rstd
    grad_x = grad_weight = None
    if output_mask[0]:
        inner = _inner(x, normalized)
        grad_x = _grad_input(_affine(grad, weight), xhat, rstd, inner, centered=False)
    if output_mask[1] and weight is not None:
        grad_weight = (grad * xhat).sum(_outer(x, normalized))
    return grad_x, grad_weight


# ---- group normalization: statistics over the channels of a group ----


def _grouped(x: Value, n: int, c: int, group: int) -> Value:
    """(N, C, *positions) as (N, groups, C / groups, positions)."""
    return x.reshape([n, group, c // group, math.prod(x.shape) // max(n * c, 1)])


def _affine_groups(x: Value, weight: Value | None, bias: Value | None = None) -> Value:
    """`_affine` of a grouped value, for parameters of shape (C,)."""
    parameters = (
        None if p is None else p.reshape([1, x.shape[1], x.shape[2], 1]) for p in (weight, bias)
    )
    return _affine(x, *parameters)


@rule("aten::native_group_norm")
def group_norm(
    b: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    n: int,
    c: int,
    positions: int,
    group: int,
    eps: Operand,
) -> tuple[Value, ...]:
    grouped = _grouped(x.accumulated(), n, c, group)
    mean, _, rstd = statistics(grouped, [2, 3], eps)
    out = _affine_groups((grouped - mean) * rstd, weight, bias)
    return out.reshape(x.shape), mean.reshape([n, group]), rstd.reshape([n, group])


@rule("aten::native_group_norm_backward")
def group_norm_backward(
    b: Builder,
    grad: Value,
    x: Value,
    mean: Value,
    rstd: Value,
    weight: Value | None,
    n: int,
    c: int,
    positions: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    grouped = _grouped(x.accumulated(), n, c, group)
    grad = _grouped(grad.accumulated(), n, c, group)
    mean, rstd = (b.unsqueeze(s.to(grouped.dtype), 2, 3) for s in (mean, rstd))
    xhat = (grouped - mean) * rstd
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        grad_x = _grad_input(_affine_groups(grad, weight), xhat, rstd, [2, 3]).reshape(x.shape)
    if output_mask[1]:
        grad_weight = (grad * xhat).sum([0, 3]).reshape([c])
    if output_mask[2]:
        grad_bias = grad.sum([0, 3]).reshape([c])
    return grad_x, grad_weight, grad_bias


# ---- weight normalization: w = v * (g / norm(v)), a norm for each index of `dim` ----


def _others(v: Value, dim: int) -> list[int]:
    return [d for d in range(v.rank) if d != dim % v.rank]


@rule("aten::_weight_norm_interface")
def weight_norm(b: Builder, v: Value, g: Value, dim: int) -> tuple[Value, Value]:
    v, g = v.accumulated(), g.accumulated()
    norm = sqrt((v * v).sum(_others(v, dim), keepdim=True))
    return v * (g / norm), norm


@rule("aten::_weight_norm_interface_backward")
def weight_norm_backward(
    b: Builder, grad: Value, v: Value, g: Value, norm: Value, dim: int
) -> tuple[Value, Value]:
    v, grad, g = v.accumulated(), grad.accumulated(), g.accumulated()
    unit = v / norm
    grad_g = (grad * unit).sum(_others(v, dim), keepdim=True)
    return (grad - unit * grad_g) * (g / norm), grad_g
