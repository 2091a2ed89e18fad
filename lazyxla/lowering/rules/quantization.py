"""Fake quantization: values rounded to those that a quantized tensor can hold, for training.

With a scale s and a zero point z, x becomes (clip(round(x / s) + z, low, high) - z) * s. The mask
that an operator returns besides marks the elements that were not clipped: the others have no
gradient. PyTorch multiplies by 1 / s, rounded to float32; so do these rules, as another rounding
would move values to a neighbouring step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.functions import clip, maximum, minimum, rint, where
from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

_LEAST_SCALE = 6.1e-5
"""A scale that is computed is at least this."""


def _single(b: Builder, number: Operand, shape: tuple[int, ...] = ()) -> Value:
    """A number, or a tensor of as many elements, in float32."""
    if isinstance(number, Value):
        return number.to(torch.float32).reshape(shape)
    return b.full(shape, number, torch.float32)


def _of_dim(x: Value, parameter: Value, dim: int) -> Value:
    """A value of shape (C,) in the shape that broadcasts to `x` along `dim`, in float32."""
    return _single(x.b, parameter, tuple(n if d == dim else 1 for d, n in enumerate(x.shape)))


def _quantized(x: Value, scale: Value, zero: Value, low: int, high: int) -> tuple[Value, Value]:
    """`x` in steps of `scale`, and the mask. What is no number counts as `low`."""
    x = x.accumulated()
    steps = rint(x * (1 / scale).to(x.dtype)) + zero.to(x.dtype)
    return _clipped(x, steps, scale, zero, low, high)


def _clipped(
    x: Value, steps: Value, scale: Value, zero: Value, low: int, high: int
) -> tuple[Value, Value]:
    kept = where(steps.is_nan(), x.full(low), clip(steps, low, high))
    integer = torch.int32 if -(2**31) <= low <= high < 2**31 else torch.int64
    kept = kept.to(integer).to(x.dtype)  # a negative zero becomes a positive one
    inside = (steps >= low) & (steps <= high)
    return (kept - zero.to(x.dtype)) * scale.to(x.dtype), inside


@rule("aten::fake_quantize_per_tensor_affine_cachemask")
def per_tensor(
    b: Builder, x: Value, scale: Operand, zero: Operand, low: int, high: int
) -> tuple[Value, Value]:
    return _quantized(x, _single(b, scale), _single(b, zero), low, high)


@rule("aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams")
def per_tensor_if(
    b: Builder, x: Value, scale: Value, zero: Value, enabled: Value, low: int, high: int
) -> tuple[Value, Value]:
    return _if(enabled, x, *per_tensor(b, x, scale, zero, low, high))


def _if(enabled: Value, x: Value, value: Value, mask: Value) -> tuple[Value, Value]:
    """The quantized value and its mask where this is enabled; else `x` and all of its elements."""
    on = enabled.reshape(()) != 0
    return where(on, value, x.to(value.dtype)), where(on, mask, mask.full(1))


@rule("aten::fake_quantize_per_channel_affine_cachemask")
def per_channel(
    b: Builder, x: Value, scale: Value, zero: Value, dim: int, low: int, high: int
) -> tuple[Value, Value]:
    scale, offset = _of_dim(x, scale, dim), _of_dim(x, zero, dim)
    if not zero.is_float:
        return _quantized(x, scale, offset, low, high)
    # A zero point between two steps: it is rounded with the value.
    x = x.accumulated()
    return _clipped(x, rint(x * (1 / scale).to(x.dtype) + offset), scale, offset, low, high)


# ---- scales and zero points that are learned ----


def _first(parameter: Value) -> Value:
    """The element that counts for a whole tensor, in float32."""
    return parameter.b.slice_dim(parameter, 0, 0, 1).to(torch.float32).reshape(())


def _rounded_zero(zero: Value, low: int, high: int, half_up: bool = False) -> Value:
    zero = zero.to(torch.float32)
    if half_up:  # as the gradient of a whole tensor does; the fraction is cut off
        return clip(zero + 0.5, low, high).to(torch.int64).to(torch.float32)
    return clip(rint(zero), low, high)


@rule("aten::_fake_quantize_learnable_per_tensor_affine")
def learnable_per_tensor(
    b: Builder, x: Value, scale: Value, zero: Value, low: int, high: int, factor: Operand
) -> Value:
    zero = _rounded_zero(_first(zero), low, high)
    return per_tensor(b, x, _first(scale), zero, low, high)[0]


@rule("aten::_fake_quantize_learnable_per_channel_affine")
def learnable_per_channel(
    b: Builder, x: Value, scale: Value, zero: Value, dim: int, low: int, high: int, factor: Operand
) -> Value:
    zero = _rounded_zero(zero, low, high).to(torch.int32)
    return per_channel(b, x, scale, zero, dim, low, high)[0]


def _learnable_gradients(
    grad: Value, x: Value, scale: Value, zero: Value, low: int, high: int, factor: Operand
) -> tuple[Value, Value, Value]:
    """The gradients of x, and each element's share in those of scale and zero point.

    Source: "Learned step size quantization" (Esser et al., 2020) and its asymmetric extension
    "LSQ+" (Bhalgat et al., 2020).
    """
    grad, x = grad.accumulated(), x.accumulated()
    inverse = 1 / scale
    steps = rint(zero + x * inverse)
    inside = (steps >= low) & (steps <= high)
    error = (steps - zero) * scale - x
    clipped = where(steps < low, low - zero, high - zero)
    of_scale = where(inside, grad * error * inverse, grad * clipped) * x.full(factor)
    of_zero = where(inside, grad.full(0), -grad * scale * x.full(factor))
    return where(inside, grad, grad.full(0)), of_scale, of_zero


@rule("aten::_fake_quantize_learnable_per_tensor_affine_backward")
def learnable_per_tensor_backward(
    b: Builder,
    grad: Value,
    x: Value,
    scale: Value,
    zero: Value,
    low: int,
    high: int,
    factor: Operand,
) -> tuple[Value, Value, Value]:
    zero = _rounded_zero(_first(zero), low, high, half_up=True)
    shares = _learnable_gradients(grad, x, _first(scale), zero, low, high, factor)
    of_scale, of_zero = (share.sum(range(x.rank)).reshape([1]) for share in shares[1:])
    return shares[0], of_scale, of_zero


@rule("aten::_fake_quantize_learnable_per_channel_affine_backward")
def learnable_per_channel_backward(
    b: Builder,
    grad: Value,
    x: Value,
    scale: Value,
    zero: Value,
    dim: int,
    low: int,
    high: int,
    factor: Operand,
) -> tuple[Value, Value, Value]:
    scale, zero = _of_dim(x, scale, dim), _rounded_zero(_of_dim(x, zero, dim), low, high)
    of_x, of_scale, of_zero = _learnable_gradients(grad, x, scale, zero, low, high, factor)
    others = [d for d in range(x.rank) if d != dim]
    return of_x, of_scale.sum(others), of_zero.sum(others)


# ---- with an observer of the range ----


def _parameters(
    least: Value, greatest: Value, low: int, high: int, symmetric: bool
) -> tuple[Value, Value]:
    """The scale and zero point for values between two bounds, in float64.

    Zero is one of the values that can be held. The zero point is computed from the bound that loses
    fewer digits.
    """
    double = torch.float64
    if symmetric:
        both = (least < 0) & (greatest > 0)
        lower, upper = -((high - low) // 2 + 1), (high - low) // 2
        step = maximum(abs(least / lower), abs(greatest / upper)).to(double)
        least = where(both, (step * lower).to(least.dtype), least)
        greatest = where(both, (step * upper).to(least.dtype), greatest)
    least, greatest = minimum(least, 0), maximum(greatest, 0)
    scale = (greatest.to(double) - least.to(double)) / (high - low)
    single = scale.to(torch.float32)
    scale = where((single == 0) | (abs(1 / single) == math.inf), scale.full(0.1), scale)
    small = scale < torch.tensor(_LEAST_SCALE).item()
    grown = scale.full(_LEAST_SCALE).to(torch.float32)
    factor = grown / scale.to(torch.float32)
    least = where(small, where(greatest == 0, -grown * (high - low), least * factor), least)
    greatest = where(small, where(least == 0, grown * (high - low), greatest * factor), greatest)
    scale = where(small, grown.to(double), scale)
    below, above = least.to(double) / scale, greatest.to(double) / scale
    first = abs(low) - abs(below) < abs(high) - abs(above)
    zero = where(first, low - below, high - above)
    if symmetric:
        zero = where((least < 0) & (greatest > 0), zero.full((low + high) / 2), zero)
    return scale, rint(clip(zero, low, high))


def _moved(old: Value, new: Value, rate: Operand) -> Value:
    """The moving average; infinite until there is a first value."""
    return where(abs(old) == math.inf, new, old + old.full(rate) * (new - old))


@rule("aten::_fused_moving_avg_obs_fq_helper_functional")
def observed(
    b: Builder,
    x: Value,
    observing: Value,
    quantizing: Value,
    least: Value,
    greatest: Value,
    scale: Value,
    zero: Value,
    rate: Operand,
    low: int,
    high: int,
    dim: int,
    of_channels: bool,
    symmetric: bool,
) -> tuple[Value, ...]:
    """The quantized input and its mask; then the observer's bounds, the scale and zero point."""
    dims = [d for d in range(x.rank) if d != dim or not of_channels]
    single, on = x.to(least.dtype), quantizing.reshape(()) != 0
    now = (b.extremum(single, dims, "min"), b.extremum(single, dims, "max"))
    watched = observing.reshape(()) != 0
    least, greatest = (
        where(watched, _moved(old, new.reshape(old.shape), rate), old)
        for old, new in zip((least, greatest), now, strict=True)
    )
    found = _parameters(least, greatest, low, high, symmetric)
    scale, zero = (
        where(on, new.to(old.dtype).reshape(old.shape), old)
        for old, new in zip((scale, zero), found, strict=True)
    )
    if of_channels:
        value, mask = per_channel(b, x, scale, zero, dim, low, high)
    else:
        value, mask = per_tensor(b, x, scale, zero, low, high)
    return *_if(quantizing, x, value, mask), least, greatest, scale, zero
