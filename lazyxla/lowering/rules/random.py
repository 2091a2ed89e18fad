"""Random numbers: distributions made of a stream's bits (streams.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.functions import ceil, erfinv, exp, log, maximum, minimum, tan, where
from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.registry import graph_rule, rule
from lazyxla.lowering.scalar import Scalar
from lazyxla.lowering.streams import Stream, bits_of
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from jax import Array

    from lazyxla.lowering.builder import Builder

Integer = Scalar | int


# ---- basic distributions ----


def _whole_numbers(
    b: Builder,
    shape: Sequence[int],
    dtype: torch.dtype,
    digits: int,
    stream: Stream | None = None,
) -> Value:
    """Uniform whole numbers below 2**digits as values of float32 or float64."""
    word, signed = (
        (torch.uint64, torch.int64) if dtype == torch.float64 else (torch.uint32, torch.int32)
    )
    bits = bits_of(b, shape, word, stream)
    # Signed numbers convert faster; the top bit is zero by now.
    return b.bitcast(bits >> (word.itemsize * 8 - digits), signed).to(dtype)


_DIGITS = {
    torch.float64: 53,
    torch.float32: 24,
    torch.float16: 11,
    torch.bfloat16: 8,
}


def sampling_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to sample in: float32 unless the result has higher precision."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def _unit(b: Builder, shape: Sequence[int], dtype: torch.dtype) -> Value:
    """Uniform in [0, 1) with all the digits of `dtype`, in the dtype to sample in."""
    digits = _DIGITS.get(dtype, 24)
    return _whole_numbers(b, shape, sampling_dtype(dtype), digits) * 2.0**-digits


def _open_unit(b: Builder, shape: Sequence[int], dtype: torch.dtype) -> Value:
    """Uniform in (0, 1), symmetric about 1/2, in the dtype to sample in."""
    dtype = sampling_dtype(dtype)
    digits = _DIGITS[dtype] - 1
    return (_whole_numbers(b, shape, dtype, digits) + 0.5) * 2.0**-digits


def _gauss(b: Builder, shape: Sequence[int], dtype: torch.dtype) -> Value:
    """Standard normal numbers by inversion; complex ones have variance 1 in all."""
    if dtype.is_complex:
        part = b.real_dtype(dtype)
        both = _gauss(b, [2, *shape], part) * math.sqrt(0.5)
        return b.complex(b.select_dim(both, 0, 0), b.select_dim(both, 0, 1))
    unit = _open_unit(b, shape, dtype)
    return erfinv(unit + unit - 1) * math.sqrt(2.0)


def _affine(x: Value, factor: Operand, offset: Operand) -> Value:
    """x * factor + offset in the dtype of `x`; both may be values that broadcast to x."""
    b = x.b
    if not b.is_const(factor, 1):
        x = x * b.value(factor, x.dtype)
    return x if b.is_const(offset, 0) else x + b.value(offset, x.dtype)


def chance(b: Builder, p: Operand, shape: Sequence[int], stream: Stream | None = None) -> Value:
    """True with probability `p`, a number or a value that broadcasts to `shape`."""
    dtype = torch.float64 if b.shape(p) and b.dtype(p) == torch.float64 else torch.float32
    digits = _DIGITS[dtype]
    limit = b.value(p, dtype) * 2.0**digits
    if not b.shape(p) and all(shape):
        return b.random_below(shape, limit, *(b.rng if stream is None else stream))
    return _whole_numbers(b, shape, dtype, digits, stream) < limit


# ---- continuous ----


@rule("aten::uniform")
def uniform(b: Builder, x: Value, low: Operand, high: Operand, generator: None) -> Value:
    dtype, shape = b.outputs[0]
    unit = _unit(b, shape, dtype)
    if b.is_const(low, 0) and b.is_const(high, 1):
        return unit
    first, last = b.value(low, unit.dtype), b.value(high, unit.dtype)
    result = _affine(unit, last - first, first).to(dtype)
    # Rounding may reach the upper bound, which is not part of the interval.
    return where(result < last.to(dtype), result, first.to(dtype))


@rule("aten::normal.Tensor_float", "aten::normal.float_Tensor", "aten::normal.Tensor_Tensor")
@graph_rule("aten::normal.float_float")
def normal(b: Builder, mean: Operand, std: Operand, *_: Any) -> Value:
    dtype, shape = b.outputs[0]
    return _affine(_gauss(b, shape, dtype), std, mean)


@rule("aten::normal_functional")
def normal_like(b: Builder, x: Value, mean: Operand, std: Operand, generator: None) -> Value:
    return normal(b, mean, std)


@rule("aten::log_normal")
def log_normal(b: Builder, x: Value, mean: Operand, std: Operand, generator: None) -> Value:
    return exp(normal(b, mean, std))


def _exponential(b: Builder, shape: Sequence[int], dtype: torch.dtype) -> Value:
    """Exponentially distributed numbers with rate 1, never 0."""
    return -log(_open_unit(b, shape, dtype))


@rule("aten::exponential")
def exponential(b: Builder, x: Value, rate: Operand, generator: None) -> Value:
    dtype, shape = b.outputs[0]
    number = _exponential(b, shape, dtype)
    return number if b.is_const(rate, 1) else number / rate


@rule("aten::cauchy")
def cauchy(b: Builder, x: Value, median: Operand, sigma: Operand, generator: None) -> Value:
    dtype, shape = b.outputs[0]
    angle = _affine(_open_unit(b, shape, dtype), math.pi, -math.pi / 2)
    return _affine(tan(angle), sigma, median)


# ---- discrete ----


@rule("aten::geometric")
def geometric(b: Builder, x: Value, p: Operand, generator: None) -> Value:
    dtype, shape = b.outputs[0]
    number = _exponential(b, shape, dtype)
    rate = -(-b.value(p, number.dtype)).call("log_plus_one")
    return maximum(ceil(number / rate), 1)


@rule("aten::bernoulli")
def bernoulli(b: Builder, p: Value, generator: None) -> Value:
    return chance(b, p, b.outputs[0].shape)


@rule("aten::bernoulli.p", "aten::bernoulli.Tensor")
def bernoulli_p(b: Builder, x: Value, p: Operand, generator: None) -> Value:
    return chance(b, p, b.outputs[0].shape)


def _integers(b: Builder, low: Integer, high: Integer) -> Value:
    """Integers in [low, high) by the remainder of 32 or 64 random bits, as in PyTorch."""
    dtype, shape = b.outputs[0]
    if dtype.is_floating_point or not (_has_32_bits(low) and _has_32_bits(high)):
        return _integers_between(b, int(low), int(high))
    first, last = b.value(low, torch.int64), b.value(high, torch.int64)
    number = bits_of(b, shape, torch.uint32) % (last - first).to(torch.uint32)
    # As an int32 the number may wrap around; the sum wraps it back.
    return number.to(torch.int32) + first.to(torch.int32)


def _has_32_bits(bound: Integer) -> bool:
    """This is part of the call, and holds for all that a bound may become."""
    number = bound.number if isinstance(bound, Scalar) else bound
    return isinstance(number, int) and -(1 << 31) <= number < 1 << 31


def _integers_between(b: Builder, low: int, high: int) -> Value:
    dtype, shape = b.outputs[0]
    span = high - low
    word = torch.uint32 if span <= 1 << 32 else torch.uint64
    number = bits_of(b, shape, word)
    if span < 1 << (word.itemsize * 8):
        number = number % span
    narrow = word == torch.uint32 and low >= -(1 << 31) and high <= 1 << 31
    number = number.to(torch.int32 if narrow else torch.int64)
    number = number + low if low else number
    if not dtype.is_floating_point:
        return number
    # The greatest float within bounds: conversion may round beyond it.
    last = torch.tensor(high - 1, dtype=torch.float64)
    bound = last.to(dtype)
    if bound > last:
        bound = torch.nextafter(bound, torch.tensor(-math.inf, dtype=dtype))
    return minimum(number.to(dtype), bound.item())


@rule("aten::random")
def random(b: Builder, x: Value, generator: None) -> Value:
    """All non-negative integers of the dtype; for a float, those that it holds without a gap."""
    return _integers_between(b, 0, _greatest(b.outputs[0].dtype) + 1)


def _greatest(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return 1
    return 1 << _DIGITS[dtype] if dtype.is_floating_point else int(torch.iinfo(dtype).max)


@rule("aten::random.from")
def random_from(b: Builder, x: Value, low: Integer, high: Integer | None, generator: None) -> Value:
    if high is None:
        return _integers_between(b, int(low), _greatest(b.outputs[0].dtype) + 1)
    return _integers(b, low, high)


@rule("aten::random.to")
def random_to(b: Builder, x: Value, high: Integer, generator: None) -> Value:
    return _integers(b, 0, high)


# Traced graphs have factories, too; elsewhere PyTorch takes them apart into empty tensors that are
# written to.


@graph_rule("aten::rand", "aten::rand_like")
def rand(b: Builder, *_: Any) -> Value:
    return _unit(b, b.outputs[0].shape, b.outputs[0].dtype)


@graph_rule("aten::randn", "aten::randn_like")
def randn(b: Builder, *_: Any) -> Value:
    return _gauss(b, b.outputs[0].shape, b.outputs[0].dtype)


@graph_rule("aten::randint")
def randint(b: Builder, high: int, *_: Any) -> Value:
    return _integers(b, 0, high)


@graph_rule("aten::randint.low")
def randint_low(b: Builder, low: int, high: int, *_: Any) -> Value:
    return _integers(b, low, high)


@graph_rule("aten::randint_like")
def randint_like(b: Builder, x: Value, high: int, *_: Any) -> Value:
    return _integers(b, 0, high)


@graph_rule("aten::randint_like.low_dtype")
def randint_like_low(b: Builder, x: Value, low: int, high: int, *_: Any) -> Value:
    return _integers(b, low, high)


_PACKED_BITS = 24
"""Up to so many bits a number is packed into its key. Of 2**24 keys of 40 bits 128 pairs are
expected to be equal, whose numbers keep their order."""


@rule("aten::randperm", "aten::randperm.generator")
def randperm(b: Builder, n: int, *_: Any) -> Value:
    """The numbers sorted by random keys. One array is sorted in a fifth of the time of two."""
    keys = bits_of(b, [n], torch.uint64)
    width = max(n - 1, 0).bit_length()
    if width > _PACKED_BITS:
        return b.sort([keys, b.iota([n], 0, torch.int64)], 0, stable=False)[1]
    packed = (keys >> width << width) | b.iota([n], 0, torch.uint64)
    (packed,) = b.sort([packed], 0)
    return (packed & ((1 << width) - 1)).to(torch.int64)


@rule("aten::multinomial")
def multinomial(
    b: Builder, weights: Value, count: int, replacement: bool, generator: None
) -> Value:
    """Without replacement, the greatest of weight / exponential number: this samples exactly."""
    weights = weights.to(sampling_dtype(weights.dtype))
    if not replacement or count == 1:
        rank = weights / _exponential(b, weights.shape, weights.dtype)
        if count == 1:
            return b.arg_reduce(rank, rank.rank - 1, "max", keepdim=True)[1]
        specs = [TensorSpec(rank.dtype, b.outputs[0].shape), b.outputs[0]]
        return b.lower_op("aten::topk", rank, count, -1, True, True, outputs=specs)[1]
    unit = _unit(b, b.outputs[0].shape, weights.dtype)
    return b.call_jax(_by_distribution, weights, unit)


def _by_distribution(weights: Array, unit: Array) -> Array:
    """For every number of `unit` the category into whose share of the total weight it falls."""
    import jax
    import jax.numpy as jnp

    def draw(row: Array, numbers: Array) -> Array:
        sums = jnp.cumsum(row)
        share = numbers * sums[-1]
        share = jnp.where(share < sums[-1], share, 0)  # rounding may reach the end
        return jnp.searchsorted(sums, share, side="right").astype(jnp.int64)

    return jax.vmap(draw)(weights, unit) if weights.ndim == 2 else draw(weights, unit)


# ---- dropout ----


def masked(b: Builder, x: Value, mask: Value, factor: Operand) -> Value:
    """x * mask * factor in the dtype that PyTorch computes in."""
    computed = x.accumulated()
    kept = where(mask.to(torch.bool), b.value(factor, computed.dtype), 0)
    return (computed * kept).to(x.dtype)


def dropout(
    b: Builder, p: Operand, shape: Sequence[int], stream: Stream | None = None
) -> tuple[Value, Value]:
    """A bool mask of what is kept, and the float64 to multiply it with, 1 / (1 - p)."""
    keep = 1 - b.value(p, torch.float64)
    return chance(b, keep, shape, stream), where(keep == 0, 0, 1 / keep)


@rule("aten::native_dropout")
def native_dropout(b: Builder, x: Value, p: Operand, train: bool | None) -> list[Value]:
    if train is False or b.is_const(p, 0):
        return [x, b.full(x.shape, True, torch.bool)]
    mask, factor = dropout(b, p, x.shape)
    return [masked(b, x, mask, factor), mask]


@rule("aten::native_dropout_backward")
def native_dropout_backward(b: Builder, grad: Value, mask: Value, scale: Operand) -> Value:
    # A gradient of bools times a scale is a float.
    grad, mask = b.broadcast(grad.to(b.outputs[0].dtype), mask)
    return masked(b, grad, mask, scale)


@rule("aten::_fused_dropout")
def fused_dropout(b: Builder, x: Value, p: Operand, generator: None) -> list[Value]:
    """`p` is the probability to keep an element."""
    keep = b.value(p, torch.float64)
    mask = chance(b, keep, x.shape)
    return [masked(b, x, mask, 1 / keep), mask]


@rule("aten::rrelu_with_noise_functional")
def rrelu_with_noise(
    b: Builder,
    x: Value,
    noise: Value,
    low: Operand,
    high: Operand,
    training: bool,
    generator: None,
) -> list[Value]:
    dtype = sampling_dtype(x.dtype)
    x, least, most = x.to(dtype), b.value(low, dtype), b.value(high, dtype)
    if training:
        slope = _affine(_unit(b, x.shape, dtype), most - least, least)
    else:
        slope = (least + most) * 0.5
    slope = where(x <= 0, slope, 1)
    return [x * slope, slope if training else noise]
