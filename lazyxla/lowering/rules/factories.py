"""Operators that make tensors from numbers: fills, ranges, triangles."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.functions import maximum, sqrt, where
from lazyxla.lowering.registry import graph_rule, rule
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
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
def full(b: Builder, _like: Any, value: Value, *_: Any) -> Value:
    return b.full(b.outputs[0].shape, value, b.outputs[0].dtype)


@graph_rule("aten::new_full")
def new_full(b: Builder, x: Value, size: list[int], value: Value, *_: Any) -> Value:
    return b.full(b.outputs[0].shape, value, b.outputs[0].dtype)


@rule("aten::scalar_tensor")
def scalar_tensor(b: Builder, value: Value, *_: Any) -> Value:
    return b.full((), value, b.outputs[0].dtype)


@rule("aten::eye", "aten::eye.m")
def eye(b: Builder, *_: Any) -> Value:
    shape = b.outputs[0].shape
    return b.compare(b.iota(shape, 0, torch.int64), b.iota(shape, 1, torch.int64), "EQ")


# ---- ranges ----


def _range_dtype(b: Builder, *numbers: Value) -> torch.dtype:
    """Ranges are computed in 64 bits as on the CPU; a TPU emulates float64, so float32 serves
    there.
    """
    if b.outputs[0].dtype.is_complex:
        return b.outputs[0].dtype
    if b.outputs[0].dtype.is_floating_point or any(b.dtype(n).is_floating_point for n in numbers):
        small = b.outputs[0].dtype != torch.float64 and b.platform == "tpu"
        return torch.float32 if small else torch.float64
    return torch.int64


def _range(b: Builder, start: Value, step: Value) -> Value:
    integral = not b.outputs[0].dtype.is_floating_point
    # For an integer result PyTorch truncates start and step, not the elements.
    dtype = torch.int64 if integral else _range_dtype(b)
    shape = b.outputs[0].shape
    place = b.iota(shape, 0, dtype)
    scaled = b.hlo.multiply(place, b.full(shape, step, dtype))
    return b.hlo.add(scaled, b.full(shape, start, dtype))


@rule("aten::arange")
def arange(b: Builder, end: Value, *_: Any) -> Value:
    dtype = b.outputs[0].dtype
    # Integers that the dtype holds exactly come straight from an iota.
    return b.iota(b.outputs[0].shape, 0, dtype)


@rule("aten::arange.start", "aten::range")
def arange_start(b: Builder, start: Value, end: Value, *_: Any) -> Value:
    return _range(b, start, 1)


@rule("aten::arange.start_step", "aten::range.step")
def arange_step(b: Builder, start: Value, end: Value, step: Value, *_: Any) -> Value:
    return _range(b, start, step)


def _linspace(b: Builder, start: Value, end: Value, steps: int) -> Value:
    """Counted from both ends, so that the last element is exactly `end`."""
    shape, given = b.outputs[0].shape, b.outputs[0].dtype
    dtype = _range_dtype(b, 0.0)
    if steps <= 1:
        return b.full(shape, b.value(start, dtype), dtype)
    # The bounds have the result's type in PyTorch: those of integers are truncated.
    bounds = (b.convert(b.value(n, given), dtype) for n in (start, end))
    first, last = (b.full(shape, n, dtype) for n in bounds)
    real = b.real_dtype(dtype)
    place = b.iota(shape, 0, real)
    left = ((steps - 1) - place).to(dtype)
    # XLA would multiply by the reciprocal of a constant: 49 / 49 would be less than 1.
    gaps = b.hlo.optimization_barrier([b.full(shape, steps - 1, dtype)])
    step = (last - first) / gaps
    return where(place < steps // 2, first + step * place.to(dtype), last - step * left)


@rule(
    "aten::linspace",
    "aten::linspace.Tensor_Tensor",
    "aten::linspace.Tensor_Scalar",
    "aten::linspace.Scalar_Tensor",
)
def linspace(b: Builder, start: Value, end: Value, steps: int, *_: Any) -> Value:
    return _linspace(b, start, end, steps)


@rule(
    "aten::logspace",
    "aten::logspace.Tensor_Tensor",
    "aten::logspace.Tensor_Scalar",
    "aten::logspace.Scalar_Tensor",
)
def logspace(b: Builder, start: Value, end: Value, steps: int, base: Value, *_: Any) -> Value:
    exponent = _linspace(b, start, end, steps)
    return b.full(b.outputs[0].shape, base, exponent.dtype) ** exponent


# ---- windows ----


def _window_place(b: Builder, size: int, periodic: bool) -> Value:
    """0 .. 1 over the window, or just short of 1 if it is periodic."""
    place = b.iota(b.outputs[0].shape, 0, b.compute_dtype(b.outputs[0].dtype))
    return place / max(size if periodic else size - 1, 1)


def _cosine_window(b: Builder, size: int, periodic: bool, coefficients: list[Value]) -> Value:
    """The sum of coefficients[k] * cos(2 pi k place)."""
    shape = b.outputs[0].shape
    place = _window_place(b, size, periodic)
    if size <= 1:
        return place.full(1)
    total = b.full(shape, coefficients[0], place.dtype)
    for order, coefficient in enumerate(coefficients[1:], 1):
        factor = b.full(shape, coefficient, place.dtype)
        total = total + factor * (place * (2 * math.pi * order)).call("cosine")
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
    beta = b.value(rest[2], torch.float64) if len(rest) >= 7 else None
    second = -0.46 if beta is None else (-beta)
    return _cosine_window(b, size, _periodic(rest), [alpha, second])


@rule("aten::bartlett_window", "aten::bartlett_window.periodic")
def bartlett_window(b: Builder, size: int, *rest: Any) -> Value:
    place = _window_place(b, size, _periodic(rest))
    return 1 - abs(2 * place - 1) if size > 1 else place.full(1)


@rule("aten::kaiser_window", "aten::kaiser_window.periodic", "aten::kaiser_window.beta")
def kaiser_window(b: Builder, size: int, *rest: Any) -> Value:
    place = _window_place(b, size, _periodic(rest))
    if size <= 1:
        return place.full(1)
    beta = b.full(b.outputs[0].shape, rest[1] if len(rest) == 6 else 12.0, place.dtype)
    side = 2 * place - 1
    arch = sqrt(maximum(1 - side * side, 0))
    scale, top = (b.call_jax(_bessel_i0, x) for x in (beta * arch, beta))
    return b.hlo.divide(scale, top)


def _bessel_i0(x: Any) -> Any:
    from jax.scipy.special import i0

    return i0(x)


def _periodic(rest: tuple[Any, ...]) -> bool:
    """The `periodic` flag of overloads that have one; it is true by default."""
    return rest[0] if len(rest) >= 5 else True


# ---- triangles ----


def _triangle(b: Builder, shape: tuple[int, ...], diagonal: Value, lower: bool) -> Value:
    """bool mask over the last two dimensions: on, below (or above) the diagonal."""
    size = shape[-2:]
    low, high = (b.constant(n, torch.int64) for n in (-size[0], size[1]))
    row, column = b.iota(size, 0, torch.int32), b.iota(size, 1, torch.int32)
    if not b.is_const(diagonal, 0):
        # Beyond the corners nothing changes.
        place = b.hlo.clamp(low, b.value(diagonal, torch.int64), high)
        row = b.hlo.add(row, b.broadcast_to(b.convert(place, torch.int32), size))
    return b.broadcast_to(b.compare(column, row, "LE" if lower else "GE"), shape)


@rule("aten::tril")
def tril(b: Builder, x: Value, diagonal: Value) -> Value:
    return b.select(_triangle(b, b.shape(x), diagonal, True), x, 0)


@rule("aten::triu")
def triu(b: Builder, x: Value, diagonal: Value) -> Value:
    return b.select(_triangle(b, b.shape(x), diagonal, False), x, 0)


@rule("aten::tril_indices")
def tril_indices(b: Builder, row: int, col: int, offset: int, *_: Any) -> Value:
    return _places(b, _triangle(b, (row, col), offset, True))


@rule("aten::triu_indices")
def triu_indices(b: Builder, row: int, col: int, offset: int, *_: Any) -> Value:
    return _places(b, _triangle(b, (row, col), offset, False))


def _places(b: Builder, mask: Value) -> Value:
    """Rows and columns of the elements of `mask` that hold."""
    return b.call_jax(_nonzero, mask, count=b.outputs[0].shape[1])


def _nonzero(mask: Any, count: int) -> Any:
    import jax.numpy as jnp

    return jnp.stack(jnp.nonzero(mask, size=count))
