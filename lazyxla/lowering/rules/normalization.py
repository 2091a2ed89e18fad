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

from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


def wide(b: Builder, *xs: Value | None) -> list[Value | None]:
    """The values in the dtype that the first one is computed in; None stays None."""
    dtype = b.compute_dtype(b.dtype(xs[0]))
    return [None if x is None else b.convert(x, dtype) for x in xs]


def statistics(b: Builder, x: Value, dims: Sequence[int], eps: Value) -> tuple[Value, ...]:
    """Mean, sum of squared deviations and 1 / sqrt(variance + eps) over `dims`, which are kept."""
    mean = b.mean(x, dims, keepdim=True)
    deviation = b.hlo.subtract(x, b.broadcast_to(mean, b.shape(x)))
    squares = b.reduce(b.hlo.multiply(deviation, deviation), dims, "sum", keepdim=True)
    variance = b.hlo.divide(squares, b.full_like(squares, b.count(x, dims)))
    return mean, squares, _rsqrt(b, variance, eps)


def _rsqrt(b: Builder, variance: Value, eps: Value) -> Value:
    """1 / sqrt(variance + eps)."""
    eps = b.full(b.shape(variance), eps, b.dtype(variance))
    return b.hlo.rsqrt(b.hlo.add(variance, eps))


def _standardize(b: Builder, x: Value, mean: Value | None, rstd: Value) -> Value:
    """(x - mean) * rstd."""
    if mean is not None:
        x = b.hlo.subtract(x, b.broadcast_to(mean, b.shape(x)))
    return b.hlo.multiply(x, b.broadcast_to(rstd, b.shape(x)))


def _affine(b: Builder, x: Value, weight: Value | None, bias: Value | None) -> Value:
    """x * weight + bias, for parameters that broadcast to `x`."""
    if weight is not None:
        x = b.hlo.multiply(x, b.broadcast_to(weight, b.shape(x)))
    if bias is not None:
        x = b.hlo.add(x, b.broadcast_to(bias, b.shape(x)))
    return x


def _grad_input(
    b: Builder, g: Value, xhat: Value, rstd: Value, dims: Sequence[int], centered: bool = True
) -> Value:
    """The gradient of the module's formula; `g` is already multiplied by the weight."""
    shape = b.shape(g)
    along = b.mean(b.hlo.multiply(g, xhat), dims, keepdim=True)
    rest = b.hlo.subtract(g, b.hlo.multiply(xhat, b.broadcast_to(along, shape)))
    if centered:
        rest = b.hlo.subtract(rest, b.broadcast_to(b.mean(g, dims, keepdim=True), shape))
    return b.hlo.multiply(rest, b.broadcast_to(rstd, shape))


# ---- batch normalization: statistics of each channel (dimension 1) ----


def of_channels(b: Builder, x: Value, parameter: Value | None) -> Value | None:
    """A value of shape (C,) in the shape (1, C, 1, ...) that broadcasts to `x`."""
    if parameter is None:
        return None
    return b.reshape(parameter, [1, -1] + [1] * (b.rank(x) - 2))


def channel_dims(b: Builder, x: Value) -> list[int]:
    return [0, *range(2, b.rank(x))]


def _train(
    b: Builder, x: Value, weight: Value | None, bias: Value | None, eps: Value
) -> tuple[Value, Value, Value, Value]:
    """The normalized input; and mean, rstd and unbiased variance, each of shape (C,)."""
    x, weight, bias = wide(b, x, weight, bias)
    dims = channel_dims(b, x)
    mean, squares, rstd = statistics(b, x, dims, eps)
    out = _standardize(b, x, mean, rstd)
    out = _affine(b, out, of_channels(b, x, weight), of_channels(b, x, bias))
    variance = b.hlo.divide(squares, b.full_like(squares, b.count(x, dims) - 1))
    return out, *(b.reshape(s, [-1]) for s in (mean, rstd, variance))


def _evaluate(
    b: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    variance: Value,
    eps: Value,
) -> tuple[Value, Value, Value]:
    """The input normalized by known statistics; and what is saved: mean and rstd, or nothing."""
    x, weight, bias, mean, variance = wide(b, x, weight, bias, mean, variance)
    rstd = _rsqrt(b, variance, eps)
    out = _standardize(b, x, of_channels(b, x, mean), of_channels(b, x, rstd))
    out = _affine(b, out, of_channels(b, x, weight), of_channels(b, x, bias))
    if b.outputs[1].shape == (0,):
        mean = rstd = b.zeros((0,), b.dtype(x))
    return out, mean, rstd


def _moving(b: Builder, old: Value, new: Value, momentum: Value) -> Value:
    """(1 - momentum) * old + momentum * new."""
    (new, old) = wide(b, new, old)
    factor = b.full(b.shape(new), momentum, b.dtype(new))
    keep = b.hlo.subtract(b.full_like(factor, 1), factor)
    return b.hlo.add(b.hlo.multiply(old, keep), b.hlo.multiply(new, factor))


@rule("aten::_native_batch_norm_legit.no_stats")
def batch_norm_no_stats(
    b: Builder, x: Value, weight: Any, bias: Any, training: bool, momentum: Value, eps: Value
) -> tuple[Value, ...]:
    return _train(b, x, weight, bias, eps)[:3]


@rule("aten::_native_batch_norm_legit_functional")
def batch_norm_functional(
    b: Builder,
    x: Value,
    weight: Any,
    bias: Any,
    mean: Value,
    variance: Value,
    training: bool,
    momentum: Value,
    eps: Value,
) -> tuple[Value, ...]:
    if not training:
        return *_evaluate(b, x, weight, bias, mean, variance, eps), mean, variance
    *results, batch_variance = _train(b, x, weight, bias, eps)
    mean = _moving(b, mean, results[1], momentum)
    return *results, mean, _moving(b, variance, batch_variance, momentum)


@rule("aten::_native_batch_norm_legit_no_training")
def batch_norm_no_training(
    b: Builder,
    x: Value,
    weight: Any,
    bias: Any,
    mean: Value,
    variance: Value,
    momentum: Value,
    eps: Value,
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
    momentum: Value,
    eps: Value,
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
    momentum: Value,
    eps: Value,
) -> tuple[Value, ...]:
    if mean is None:
        return *_train(b, x, weight, bias, eps)[:3], _reserve(b)
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
    eps: Value,
    output_mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    x, grad, weight = wide(b, x, grad, weight)
    if train:
        mean, rstd = save_mean, save_rstd
    else:
        mean, variance = running_mean, running_var
        rstd = _rsqrt(b, wide(b, x, variance)[1], eps)
    mean, rstd = (of_channels(b, x, s) for s in wide(b, x, mean, rstd)[1:])
    dims = channel_dims(b, x)
    xhat = _standardize(b, x, mean, rstd)
    g = _affine(b, grad, of_channels(b, x, weight), None)
    if train:
        grad_x = _grad_input(b, g, xhat, rstd, dims)
    else:
        grad_x = b.hlo.multiply(g, b.broadcast_to(rstd, b.shape(g)))
    grads = grad_x, b.reduce(b.hlo.multiply(grad, xhat), dims, "sum"), b.reduce(grad, dims, "sum")
    # PyTorch's meta function makes the input's, whether it is wanted or not.
    wanted = (True, *output_mask[1:])
    return tuple(g if w else None for g, w in zip(grads, wanted, strict=True))


@rule("aten::batch_norm_backward")
def batch_norm_backward_reserved(b: Builder, *args: Any) -> tuple[Value | None, ...]:
    return batch_norm_backward(b, *args[:-1])


# ---- layer and RMS normalization: statistics over the trailing dimensions ----


def _inner(b: Builder, x: Value, normalized: Sequence[int]) -> list[int]:
    return list(range(b.rank(x) - len(normalized), b.rank(x)))


@rule("aten::native_layer_norm")
def layer_norm(
    b: Builder,
    x: Value,
    normalized: Sequence[int],
    weight: Value | None,
    bias: Value | None,
    eps: Value,
) -> tuple[Value, ...]:
    x, weight, bias = wide(b, x, weight, bias)
    mean, _, rstd = statistics(b, x, _inner(b, x, normalized), eps)
    return _affine(b, _standardize(b, x, mean, rstd), weight, bias), mean, rstd


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
    x, grad, mean, rstd, weight = wide(b, x, grad, mean, rstd, weight)
    inner = _inner(b, x, normalized)
    outer = list(range(b.rank(x) - len(inner)))
    xhat = _standardize(b, x, mean, rstd)
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        grad_x = _grad_input(b, _affine(b, grad, weight, None), xhat, rstd, inner)
    if output_mask[1] and weight is not None:
        grad_weight = b.reduce(b.hlo.multiply(grad, xhat), outer, "sum")
    if output_mask[2] and bias is not None:
        grad_bias = b.reduce(grad, outer, "sum")
    return grad_x, grad_weight, grad_bias


@rule("aten::_fused_rms_norm")
def rms_norm(
    b: Builder, x: Value, normalized: Sequence[int], weight: Value | None, eps: Value | None
) -> tuple[Value, Value]:
    x, weight = wide(b, x, weight)
    if eps is None:
        eps = torch.finfo(b.dtype(x)).eps
    squares = b.mean(b.hlo.multiply(x, x), _inner(b, x, normalized), keepdim=True)
    rstd = _rsqrt(b, squares, eps)
    return _affine(b, _standardize(b, x, None, rstd), weight, None), rstd


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
    x, grad, rstd, weight = wide(b, x, grad, rstd, weight)
    inner = _inner(b, x, normalized)
    xhat = _standardize(b, x, None, rstd)
    grad_x = grad_weight = None
    if output_mask[0]:
        g = _affine(b, grad, weight, None)
        grad_x = _grad_input(b, g, xhat, rstd, inner, centered=False)
    if output_mask[1] and weight is not None:
        outer = list(range(b.rank(x) - len(inner)))
        grad_weight = b.reduce(b.hlo.multiply(grad, xhat), outer, "sum")
    return grad_x, grad_weight


# ---- group normalization: statistics over the channels of a group ----


def _grouped(b: Builder, x: Value, n: int, c: int, group: int) -> Value:
    """(N, C, *positions) as (N, groups, C / groups, positions)."""
    size = math.prod(b.shape(x)) // max(n * c, 1)
    return b.reshape(x, [n, group, c // group, size])


def _group_parameter(b: Builder, parameter: Value | None, group: int) -> Value | None:
    if parameter is None:
        return None
    return b.reshape(parameter, [1, group, b.shape(parameter)[0] // group, 1])


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
    eps: Value,
) -> tuple[Value, ...]:
    shape = b.shape(x)
    x, weight, bias = wide(b, x, weight, bias)
    x = _grouped(b, x, n, c, group)
    mean, _, rstd = statistics(b, x, [2, 3], eps)
    weight, bias = (_group_parameter(b, p, group) for p in (weight, bias))
    out = _affine(b, _standardize(b, x, mean, rstd), weight, bias)
    return b.reshape(out, shape), *(b.reshape(s, [n, group]) for s in (mean, rstd))


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
    shape = b.shape(x)
    x, grad, mean, rstd, weight = wide(b, x, grad, mean, rstd, weight)
    x, grad = (_grouped(b, v, n, c, group) for v in (x, grad))
    mean, rstd = (b.unsqueeze(s, 2, 3) for s in (mean, rstd))
    xhat = _standardize(b, x, mean, rstd)
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        g = _affine(b, grad, _group_parameter(b, weight, group), None)
        grad_x = b.reshape(_grad_input(b, g, xhat, rstd, [2, 3]), shape)
    if output_mask[1]:
        grad_weight = b.reshape(b.reduce(b.hlo.multiply(grad, xhat), [0, 3], "sum"), [c])
    if output_mask[2]:
        grad_bias = b.reshape(b.reduce(grad, [0, 3], "sum"), [c])
    return grad_x, grad_weight, grad_bias


# ---- weight normalization: w = v * (g / norm(v)), a norm for each index of `dim` ----


@rule("aten::_weight_norm_interface")
def weight_norm(b: Builder, v: Value, g: Value, dim: int) -> tuple[Value, Value]:
    v, g = wide(b, v, g)
    others = [d for d in range(b.rank(v)) if d != dim % b.rank(v)]
    norm = b.hlo.sqrt(b.reduce(b.hlo.multiply(v, v), others, "sum", keepdim=True))
    ratio = b.hlo.divide(g, norm)
    return b.hlo.multiply(v, b.broadcast_to(ratio, b.shape(v))), norm


@rule("aten::_weight_norm_interface_backward")
def weight_norm_backward(
    b: Builder, grad: Value, v: Value, g: Value, norm: Value, dim: int
) -> tuple[Value, Value]:
    v, grad, g, norm = wide(b, v, grad, g, norm)
    others = [d for d in range(b.rank(v)) if d != dim % b.rank(v)]
    unit = b.hlo.divide(v, b.broadcast_to(norm, b.shape(v)))
    grad_g = b.reduce(b.hlo.multiply(grad, unit), others, "sum", keepdim=True)
    rest = b.hlo.subtract(grad, b.hlo.multiply(unit, b.broadcast_to(grad_g, b.shape(v))))
    return b.hlo.multiply(rest, b.broadcast_to(b.hlo.divide(g, norm), b.shape(v))), grad_g
