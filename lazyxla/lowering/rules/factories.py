"""Operators that make tensors from numbers: fills, ranges, triangles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.functions import cos, maximum, sqrt, where
from lazyxla.lowering.registry import graph_rule, rule
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from jax import Array

    from lazyxla.lowering.builder import Builder


# Arguments that follow the ones of interest (dtype, layout, device, pin_memory, memory_format) are
# in b.outputs.


# ---- fills ----
# The *_like and new_* operators are recorded as PyTorch composes them (an empty tensor, filled),
# since they can make a tensor on another device; in traced graphs they are one node.


@rule("aten::zeros")
@graph_rule("aten::zeros_like", "aten::new_zeros")
def zeros(b: Builder, *_: Any) -> Value:
    return b.zeros(b.outputs[0].shape, b.outputs[0].dtype)


@rule("aten::ones")
@graph_rule("aten::ones_like", "aten::new_ones")
def ones(b: Builder, *_: Any) -> Value:
    return b.full(b.outputs[0].shape, 1, b.outputs[0].dtype)


@rule("aten::full")
@graph_rule("aten::full_like")
def full(b: Builder, _like: Any, value: Operand, *_: Any) -> Value:
    return b.full(b.outputs[0].shape, value, b.outputs[0].dtype)


@graph_rule("aten::new_full")
def new_full(b: Builder, x: Value, size: list[int], value: Operand, *_: Any) -> Value:
    return b.full(b.outputs[0].shape, value, b.outputs[0].dtype)


@rule("aten::scalar_tensor")
def scalar_tensor(b: Builder, value: Operand, *_: Any) -> Value:
    return b.full((), value, b.outputs[0].dtype)


@rule("aten::eye", "aten::eye.m")
def eye(b: Builder, *_: Any) -> Value:
    shape = b.outputs[0].shape
    return b.iota(shape, 0, torch.int64) == b.iota(shape, 1, torch.int64)


# ---- ranges ----


def _float_of_range(b: Builder) -> torch.dtype:
    """The dtype that a range of floats is computed in."""
    dtype = b.outputs[0].dtype
    return dtype if dtype.is_complex or dtype == torch.float64 else b.range_dtype


def _range(b: Builder, start: Operand, step: Operand) -> Value:
    dtype, shape = b.outputs[0]
    # For an integer result PyTorch truncates start and step, not the elements.
    i = b.iota(shape, 0, _float_of_range(b) if dtype.is_floating_point else torch.int64)
    return i * i.full(step) + i.full(start)


@rule("aten::arange")
def arange(b: Builder, end: Operand, *_: Any) -> Value:
    # Integers that the dtype holds exactly come straight from an iota.
    return b.iota(b.outputs[0].shape, 0, b.outputs[0].dtype)


@rule("aten::arange.start", "aten::range")
def arange_start(b: Builder, start: Operand, end: Operand, *_: Any) -> Value:
    return _range(b, start, 1)


@rule("aten::arange.start_step", "aten::range.step")
def arange_step(b: Builder, start: Operand, end: Operand, step: Operand, *_: Any) -> Value:
    return _range(b, start, step)


def _linspace(b: Builder, start: Operand, end: Operand, steps: int) -> Value:
    """Counted from both ends, so that the last element is exactly `end`, and rounded where PyTorch
    rounds: the results are the same bits."""
    # The bounds have the result's type in PyTorch: those of integers are truncated.
    first, last = (b.value(n, b.outputs[0].dtype) for n in (start, end))
    if steps <= 1:
        return b.full(b.outputs[0].shape, first, first.dtype)
    if not first.is_complex:
        return _points(b, first, last, steps)
    parts = ((first.real, last.real), (first.imag, last.imag))
    return b.complex(*(_points(b, *part, steps).to(part[0].dtype) for part in parts))


def _points(b: Builder, first: Value, last: Value, steps: int) -> Value:
    shape, dtype, wide = b.outputs[0].shape, first.dtype, b.range_dtype
    # XLA would multiply by the reciprocal of a constant: 49 / 49 would be less than 1.
    first, last, gaps = b.hlo.optimization_barrier(
        [first, last, b.constant(steps - 1, dtype if dtype.is_floating_point else wide)]
    )
    index = b.iota(shape, 0, torch.int32)
    is_early = index < steps // 2
    count = where(is_early, index, steps - 1 - index)  # of the gaps from the nearer end
    if dtype.itemsize == 2 and dtype.is_floating_point:  # each operation rounds
        rounded = partial(_rounded, b, dtype)
        step = rounded(rounded(last - first) / gaps)
        way = rounded(b.broadcast_to(step, shape) * rounded(count))
    else:
        if not dtype.is_floating_point:
            first, last = first.to(wide), last.to(wide)
        step = b.broadcast_to((last - first) / gaps, shape)
        if dtype == torch.float64:
            return _fused(
                where(is_early, step, -step), count.to(dtype), where(is_early, first, last)
            )
        first, last = first.to(wide), last.to(wide)
        way = step.to(wide) * count.to(wide)  # exact in float64: PyTorch's kernel rounds their sum
    return where(is_early, first + way, last - way)


_PRECISION = {torch.float16: (5, 10), torch.bfloat16: (8, 7)}
"""The bits of the exponent and of the mantissa."""


def _rounded(b: Builder, dtype: torch.dtype, x: Value) -> Value:
    """A number of this dtype, in a dtype to compute with.

    XLA would leave a conversion out that only loses digits, and LLVM would compute a product and
    the sum that it is in at once, on processors that do so in float16. Neither looks into
    `reduce_precision`, which makes small numbers zero.
    """
    x = x.to(b.compute_dtype(dtype))
    small = b.hlo.optimization_barrier([x.to(dtype)]).to(x.dtype)
    rounded = b.hlo.reduce_precision(x, *_PRECISION[dtype])
    return where(abs(x) < torch.finfo(dtype).tiny, small, rounded)


def _fused(x: Value, y: Value, z: Value) -> Value:
    """x * y + z in float64, rounded once; `y` is an integer below 2 ** 26 (Dekker, 1971)."""
    scaled = x * (2.0**27 + 1)
    high = scaled - (scaled - x)
    product, rest = high * y, (x - high) * y
    total = z + product
    back = total - z
    fused = total + ((z - (total - back)) + (product - back) + rest)
    return where(fused.is_nan(), x * y + z, fused)  # of infinities, and of what nearly overflows


@rule(
    "aten::linspace",
    "aten::linspace.Tensor_Tensor",
    "aten::linspace.Tensor_Scalar",
    "aten::linspace.Scalar_Tensor",
)
def linspace(b: Builder, start: Operand, end: Operand, steps: int, *_: Any) -> Value:
    return _linspace(b, start, end, steps)


@rule(
    "aten::logspace",
    "aten::logspace.Tensor_Tensor",
    "aten::logspace.Tensor_Scalar",
    "aten::logspace.Scalar_Tensor",
)
def logspace(b: Builder, start: Operand, end: Operand, steps: int, base: Operand, *_: Any) -> Value:
    dtype = b.outputs[0].dtype
    if dtype.is_complex:
        exponent = _linspace(b, start, end, steps)
        return b.full(b.outputs[0].shape, base, dtype) ** exponent
    shape, wide = b.outputs[0].shape, _float_of_range(b)  # PyTorch computes in float64
    if steps <= 1:
        exponent = b.full(shape, start, wide)
    else:
        first, last = (b.value(n, dtype) for n in (start, end))  # as those of linspace
        if not dtype.is_floating_point:
            first, last = first.to(wide), last.to(wide)
        gaps = b.hlo.optimization_barrier([b.constant(steps - 1, wide)])
        step, index = (last - first).to(wide) / gaps, b.iota(shape, 0, wide)
        up, down = first.to(wide) + step * index, last.to(wide) - step * (gaps - index)
        exponent = where(index < steps // 2, up, down)
    return b.full(shape, base, wide) ** exponent


# ---- windows ----


def _window_positions(b: Builder, size: int, periodic: bool) -> Value:
    """0 .. 1 over the window, or just short of 1 if it is periodic."""
    i = b.iota(b.outputs[0].shape, 0, b.compute_dtype(b.outputs[0].dtype))
    return i / max(size if periodic else size - 1, 1)


def _cosine_window(b: Builder, size: int, periodic: bool, coefficients: Sequence[Operand]) -> Value:
    """The sum of coefficients[k] * cos(2 pi k t)."""
    t = _window_positions(b, size, periodic)
    if size <= 1:
        return t.full(1)
    total = t.full(coefficients[0])
    for k, coefficient in enumerate(coefficients[1:], 1):
        total = total + coefficient * cos(t * (2 * math.pi * k))
    return total


# The arguments that are not listed are dtype, layout, device and pin_memory.


@rule("aten::hann_window", "aten::hann_window.periodic")
def hann_window(b: Builder, size: int, *rest: Any) -> Value:
    return _cosine_window(b, size, _periodic(rest), [0.5, -0.5])


@rule("aten::blackman_window", "aten::blackman_window.periodic")
def blackman_window(b: Builder, size: int, *rest: Any) -> Value:
    return _cosine_window(b, size, _periodic(rest), [0.42, -0.5, 0.08])


@rule(
    "aten::hamming_window",
    "aten::hamming_window.periodic",
    "aten::hamming_window.periodic_alpha",
    "aten::hamming_window.periodic_alpha_beta",
)
def hamming_window(b: Builder, size: int, *rest: Any) -> Value:
    alpha = rest[1] if len(rest) >= 6 else 0.54
    beta = b.value(rest[2], torch.float64) if len(rest) >= 7 else 0.46
    return _cosine_window(b, size, _periodic(rest), [alpha, -beta])


@rule("aten::bartlett_window", "aten::bartlett_window.periodic")
def bartlett_window(b: Builder, size: int, *rest: Any) -> Value:
    t = _window_positions(b, size, _periodic(rest))
    return 1 - abs(2 * t - 1) if size > 1 else t.full(1)


@rule("aten::kaiser_window", "aten::kaiser_window.periodic", "aten::kaiser_window.beta")
def kaiser_window(b: Builder, size: int, *rest: Any) -> Value:
    t = _window_positions(b, size, _periodic(rest))
    if size <= 1:
        return t.full(1)
    beta = t.full(rest[1] if len(rest) == 6 else 12.0)
    side = 2 * t - 1
    arch = sqrt(maximum(1 - side * side, 0))
    scale, top = (b.call_jax(_bessel_i0, x) for x in (beta * arch, beta))
    return scale / top


def _bessel_i0(x: Array) -> Array:
    from jax.scipy.special import i0

    return i0(x)


def _periodic(rest: tuple[Any, ...]) -> bool:
    """The `periodic` flag of overloads that have one; it is true by default."""
    return rest[0] if len(rest) >= 5 else True


# ---- triangles ----


def _triangle(b: Builder, shape: tuple[int, ...], diagonal: Operand, lower: bool) -> Value:
    """bool mask over the last two dimensions: on, below (or above) the diagonal."""
    size = shape[-2:]
    low, high = (b.constant(n, torch.int64) for n in (-size[0], size[1]))
    row, column = b.iota(size, 0, torch.int32), b.iota(size, 1, torch.int32)
    if not b.is_const(diagonal, 0):
        # Beyond the corners nothing changes.
        offset = b.hlo.clamp(low, b.value(diagonal, torch.int64), high)
        row = row + offset.to(torch.int32)
    return b.broadcast_to(column <= row if lower else column >= row, shape)


@rule("aten::tril")
def tril(b: Builder, x: Value, diagonal: Operand) -> Value:
    return where(_triangle(b, x.shape, diagonal, True), x, 0)


@rule("aten::triu")
def triu(b: Builder, x: Value, diagonal: Operand) -> Value:
    return where(_triangle(b, x.shape, diagonal, False), x, 0)
