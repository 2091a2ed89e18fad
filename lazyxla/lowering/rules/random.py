"""Random numbers: distributions made of a stream's bits (streams.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.registry import graph_rule, jax_rule, rule
from lazyxla.lowering.scalar import Scalar
from lazyxla.lowering.streams import Stream, bits_of
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

# ---- basic distributions ----


def _natural(
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
    shift = b.full_like(bits, word.itemsize * 8 - digits)
    # Signed numbers convert faster; the top bit is zero by now.
    return b.convert(b.bitcast(b.hlo.shift_right_logical(bits, shift), signed), dtype)


_DIGITS = {
    torch.float64: 53,
    torch.float32: 24,
    torch.float16: 11,
    torch.bfloat16: 8,
}


def _working(b: Builder, dtype: torch.dtype) -> torch.dtype:
    """The dtype to sample in: float32 unless the result is wider."""
    dtype = b.real_dtype(dtype)
    return torch.float64 if dtype == torch.float64 else torch.float32


def _unit(b: Builder, shape: Sequence[int], dtype: torch.dtype) -> Value:
    """Uniform in [0, 1) with all the digits of `dtype`, computed in its working dtype."""
    digits = _DIGITS.get(dtype, 24)
    number = _natural(b, shape, _working(b, dtype), digits)
    return b.hlo.multiply(number, b.full_like(number, 2.0**-digits))


def _open_unit(b: Builder, shape: Sequence[int], dtype: torch.dtype) -> Value:
    """Uniform in (0, 1), symmetric about 1/2, in the working dtype."""
    working = _working(b, dtype)
    digits = _DIGITS[working] - 1
    number = _natural(b, shape, working, digits)
    shifted = b.hlo.add(number, b.full_like(number, 0.5))
    return b.hlo.multiply(shifted, b.full_like(number, 2.0**-digits))


def _gauss(b: Builder, shape: Sequence[int], dtype: torch.dtype) -> Value:
    """Standard normal numbers by inversion; complex ones have variance 1 in all."""
    if dtype.is_complex:
        part = b.real_dtype(dtype)
        both = b.scale(_gauss(b, [2, *shape], part), math.sqrt(0.5))
        return b.complex(b.select_dim(both, 0, 0), b.select_dim(both, 0, 1))
    unit = _open_unit(b, shape, dtype)
    centred = b.hlo.subtract(b.hlo.add(unit, unit), b.full_like(unit, 1))
    return b.scale(b.chlo.erf_inv(centred), math.sqrt(2.0))


def _affine(b: Builder, x: Value, factor: Any, offset: Any) -> Value:
    """x * factor + offset; both may be values that broadcast to x, or numbers."""
    dtype, shape = b.spec(x)
    if not b.is_const(factor, 1):
        x = b.hlo.multiply(x, b.broadcast_to(b.value(factor, dtype), shape))
    if not b.is_const(offset, 0):
        x = b.hlo.add(x, b.broadcast_to(b.value(offset, dtype), shape))
    return x


def chance(b: Builder, p: Any, shape: Sequence[int], stream: Stream | None = None) -> Value:
    """True with probability `p`, a number or a value that broadcasts to `shape`."""
    wide = torch.float64 if b.shape(p) and b.dtype(p) == torch.float64 else torch.float32
    number = _natural(b, shape, wide, _DIGITS[wide], stream)
    limit = b.value(p, wide)
    limit = b.hlo.multiply(limit, b.full_like(limit, 2.0 ** _DIGITS[wide]))
    return b.compare(number, b.broadcast_to(limit, shape), "LT")


# ---- continuous ----


@rule("aten::uniform")
def uniform(b: Builder, x: Value, low: Any, high: Any, generator: None) -> Value:
    dtype, shape = b.outputs[0]
    unit = _unit(b, shape, dtype)
    if b.is_const(low, 0) and b.is_const(high, 1):
        return unit
    working = b.dtype(unit)
    low, high = b.value(low, working), b.value(high, working)
    result = b.convert(_affine(b, unit, b.hlo.subtract(high, low), low), dtype)
    # Rounding may reach the upper bound, which is not part of the interval.
    inside = b.compare(result, b.full(shape, high, dtype), "LT")
    return b.select(inside, result, b.full(shape, low, dtype))


@rule("aten::normal_functional")
def normal(b: Builder, x: Value, mean: Any, std: Any, generator: None) -> Value:
    dtype, shape = b.outputs[0]
    return _affine(b, _gauss(b, shape, dtype), std, mean)


@rule("aten::normal.Tensor_float", "aten::normal.float_Tensor", "aten::normal.Tensor_Tensor")
def normal_of_tensors(b: Builder, mean: Any, std: Any, generator: None) -> Value:
    return normal(b, None, mean, std, generator)


@rule("aten::log_normal")
def log_normal(b: Builder, x: Value, mean: Any, std: Any, generator: None) -> Value:
    return b.hlo.exponential(normal(b, x, mean, std, generator))


def _exponential(b: Builder, shape: Sequence[int], dtype: torch.dtype) -> Value:
    """Exponentially distributed numbers with rate 1, never 0."""
    return b.hlo.negate(b.hlo.log(_open_unit(b, shape, dtype)))


@rule("aten::exponential")
def exponential(b: Builder, x: Value, rate: Any, generator: None) -> Value:
    dtype, shape = b.outputs[0]
    number = _exponential(b, shape, dtype)
    if b.is_const(rate, 1):
        return number
    return b.hlo.divide(number, b.full(shape, rate, b.dtype(number)))


@rule("aten::cauchy")
def cauchy(b: Builder, x: Value, median: Any, sigma: Any, generator: None) -> Value:
    dtype, shape = b.outputs[0]
    unit = _open_unit(b, shape, dtype)
    angle = _affine(b, unit, math.pi, -math.pi / 2)
    return _affine(b, b.hlo.tan(angle), sigma, median)


# ---- discrete ----


@rule("aten::geometric")
def geometric(b: Builder, x: Value, p: Any, generator: None) -> Value:
    dtype, shape = b.outputs[0]
    number = _exponential(b, shape, dtype)
    rate = b.hlo.negate(b.hlo.log_plus_one(b.hlo.negate(b.value(p, b.dtype(number)))))
    trials = b.hlo.ceil(b.hlo.divide(number, b.broadcast_to(rate, shape)))
    return b.hlo.maximum(trials, b.full_like(trials, 1))


@rule("aten::bernoulli")
def bernoulli(b: Builder, p: Value, generator: None) -> Value:
    return chance(b, p, b.outputs[0].shape)


@rule("aten::bernoulli.p", "aten::bernoulli.Tensor")
def bernoulli_p(b: Builder, x: Value, p: Any, generator: None) -> Value:
    return chance(b, p, b.outputs[0].shape)


def _integers(b: Builder, low: Value, high: Value) -> Value:
    """Integers in [low, high) by the remainder of 32 or 64 random bits, as in PyTorch."""
    dtype, shape = b.outputs[0]
    bounds: list[Any] = [n.number if isinstance(n, Scalar) else n for n in (low, high)]
    # Whether numbers have 32 bits is part of the call, and holds for all that they may become.
    if dtype.is_floating_point or any(not -(1 << 31) <= n < 1 << 31 for n in bounds):
        return _integers_between(b, int(low), int(high))
    first, last = (b.value(n, torch.int64) for n in (low, high))
    number = bits_of(b, shape, torch.uint32)
    span = b.convert(b.hlo.subtract(last, first), torch.uint32)
    number = b.hlo.remainder(number, b.broadcast_to(span, shape))
    number = b.convert(number, torch.int32)  # perhaps beyond it, and back by what follows
    return b.hlo.add(number, b.broadcast_to(b.convert(first, torch.int32), shape))


def _integers_between(b: Builder, low: int, high: int) -> Value:
    dtype, shape = b.outputs[0]
    span = high - low
    word = torch.uint32 if span <= 1 << 32 else torch.uint64
    number = bits_of(b, shape, word)
    if span < 1 << (word.itemsize * 8):
        number = b.hlo.remainder(number, b.full_like(number, span))
    narrow = word == torch.uint32 and low >= -(1 << 31) and high <= 1 << 31
    number = b.convert(number, torch.int32 if narrow else torch.int64)
    number = b.hlo.add(number, b.full_like(number, low)) if low else number
    if not dtype.is_floating_point:
        return number
    # The greatest float within bounds: conversion may round beyond it.
    last = torch.tensor(high - 1, dtype=torch.float64)
    bound = last.to(dtype)
    if bound > last:
        bound = torch.nextafter(bound, torch.tensor(-math.inf, dtype=dtype))
    number = b.convert(number, dtype)
    return b.hlo.minimum(number, b.full_like(number, bound.item()))


@rule("aten::random")
def random(b: Builder, x: Value, generator: None) -> Value:
    """All non-negative integers of the dtype; for a float, those that it holds without a gap."""
    return _integers_between(b, 0, _greatest(b.outputs[0].dtype) + 1)


def _greatest(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return 1
    return 1 << _DIGITS[dtype] if dtype.is_floating_point else int(torch.iinfo(dtype).max)


@rule("aten::random.from")
def random_from(b: Builder, x: Value, low: Value, high: Value, generator: None) -> Value:
    if high is None:
        return _integers_between(b, int(low), _greatest(b.outputs[0].dtype) + 1)
    return _integers(b, low, high)


@rule("aten::random.to")
def random_to(b: Builder, x: Value, high: Value, generator: None) -> Value:
    return _integers(b, 0, high)


# Traced graphs have factories, too; elsewhere PyTorch takes them apart into empty tensors that are
# written to.


@graph_rule("aten::rand", "aten::rand_like")
def rand(b: Builder, *_: Any) -> Value:
    return _unit(b, b.outputs[0].shape, b.outputs[0].dtype)


@graph_rule("aten::randn", "aten::randn_like")
def randn(b: Builder, *_: Any) -> Value:
    return _gauss(b, b.outputs[0].shape, b.outputs[0].dtype)


@graph_rule("aten::normal.float_float")
def normal_of_size(b: Builder, mean: Any, std: Any, *_: Any) -> Value:
    return normal(b, None, mean, std, None)


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


@rule("aten::randperm")
def randperm(b: Builder, n: int, *options: Any) -> Value:
    keys = bits_of(b, [n], torch.uint64)
    return b.sort([keys, b.iota([n], 0, torch.int64)], 0, stable=False)[1]


@rule("aten::randperm.generator")
def randperm_generator(b: Builder, n: int, generator: None, *options: Any) -> Value:
    return randperm(b, n)


@rule("aten::multinomial")
def multinomial(
    b: Builder, weights: Value, count: int, replacement: bool, generator: None
) -> Value:
    """Without replacement, the greatest of weight / exponential number: this samples exactly."""
    shape = b.shape(weights)
    weights = b.convert(weights, _working(b, b.dtype(weights)))
    if not replacement or count == 1:
        rank = b.hlo.divide(weights, _exponential(b, shape, b.dtype(weights)))
        if count == 1:
            return b.arg_reduce(rank, len(shape) - 1, "max", keepdim=True)[1]
        specs = [TensorSpec(b.dtype(rank), b.outputs[0].shape), b.outputs[0]]
        return b.lower_op("aten::topk", rank, count, -1, True, True, outputs=specs)[1]
    unit = _unit(b, b.outputs[0].shape, b.dtype(weights))
    return b.call_jax(_by_distribution, weights, unit)


def _by_distribution(weights: Any, unit: Any) -> Any:
    """For every number of `unit` the category into whose share of the total weight it falls."""
    import jax
    import jax.numpy as jnp

    def draw(row: Any, numbers: Any) -> Any:
        sums = jnp.cumsum(row)
        place = numbers * sums[-1]
        place = jnp.where(place < sums[-1], place, 0)  # rounding may reach the end
        return jnp.searchsorted(sums, place, side="right").astype(jnp.int64)

    return jax.vmap(draw)(weights, unit) if weights.ndim == 2 else draw(weights, unit)


# ---- dropout ----


def masked(b: Builder, x: Value, mask: Value, factor: Any) -> Value:
    """x * mask * factor in the dtype that PyTorch computes in."""
    wide = b.compute_dtype(b.dtype(x))
    kept = b.select(b.convert(mask, torch.bool), b.value(factor, wide), b.constant(0, wide))
    return b.convert(b.hlo.multiply(b.convert(x, wide), kept), b.dtype(x))


def dropout(
    b: Builder, p: Any, shape: Sequence[int], stream: Stream | None = None
) -> tuple[Value, Value]:
    """What is kept, bools, and the float64 to multiply it with, 1 / (1 - p)."""
    one, zero = b.constant(1, torch.float64), b.constant(0, torch.float64)
    keep = b.hlo.subtract(one, b.value(p, torch.float64))
    nothing = b.compare(keep, zero, "EQ")
    return chance(b, keep, shape, stream), b.select(nothing, zero, b.hlo.divide(one, keep))


@rule("aten::native_dropout")
def native_dropout(b: Builder, x: Value, p: Any, train: bool | None) -> list[Value]:
    if train is False or b.is_const(p, 0):
        return [x, b.full(b.shape(x), True, torch.bool)]
    mask, factor = dropout(b, p, b.shape(x))
    return [masked(b, x, mask, factor), mask]


@rule("aten::native_dropout_backward")
def native_dropout_backward(b: Builder, grad: Value, mask: Value, scale: Any) -> Value:
    # A gradient of bools times a scale is a float.
    grad, mask = b.broadcast(b.convert(grad, b.outputs[0].dtype), mask)
    return masked(b, grad, mask, scale)


@rule("aten::_fused_dropout")
def fused_dropout(b: Builder, x: Value, keep: Any, generator: None) -> list[Value]:
    """`keep` is the probability to keep an element."""
    keep = b.value(keep, torch.float64)
    mask = chance(b, keep, b.shape(x))
    return [masked(b, x, mask, b.hlo.divide(b.constant(1, torch.float64), keep)), mask]


@rule("aten::rrelu_with_noise_functional")
def rrelu_with_noise(
    b: Builder, x: Value, noise: Value, low: Any, high: Any, training: bool, generator: None
) -> list[Value]:
    dtype, shape = b.spec(x)
    working = _working(b, dtype)
    wide = b.convert(x, working)
    low, high = b.value(low, working), b.value(high, working)
    if training:
        slope = _affine(b, _unit(b, shape, working), b.hlo.subtract(high, low), low)
    else:
        middle = b.hlo.multiply(b.hlo.add(low, high), b.constant(0.5, working))
        slope = b.broadcast_to(middle, shape)
    slope = b.select(b.compare(wide, b.full_like(wide, 0), "LE"), slope, 1)
    return [b.hlo.multiply(wide, slope), slope if training else noise]


# ---- by rejection, with JAX's samplers ----


def _key(seed: Any, ordinal: Any) -> Any:
    """A JAX key for the stream (seed, ordinal), two 0-dim uint64 arrays."""
    import jax
    import jax.numpy as jnp

    def halves(word: Any) -> tuple[Any, Any]:
        return (word >> 32).astype(jnp.uint32), word.astype(jnp.uint32)

    key = jax.random.wrap_key_data(jnp.stack(halves(seed)), impl="threefry2x32")
    high, low = halves(ordinal)
    return jax.random.fold_in(jax.random.fold_in(key, high), low)


def _poisson(seed: Any, ordinal: Any, rate: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.random.poisson(_key(seed, ordinal), rate, dtype=jnp.int64).astype(rate.dtype)


def _gamma(seed: Any, ordinal: Any, shape: Any) -> Any:
    import jax

    return jax.random.gamma(_key(seed, ordinal), shape, dtype=shape.dtype)


def _dirichlet(seed: Any, ordinal: Any, concentration: Any) -> Any:
    import jax

    return jax.random.dirichlet(_key(seed, ordinal), concentration, dtype=concentration.dtype)


def _binomial(seed: Any, ordinal: Any, count: Any, p: Any) -> Any:
    import jax

    return jax.random.binomial(_key(seed, ordinal), count, p, dtype=count.dtype)


def _sample(b: Builder, sampler: Any, *parameters: Any) -> Value:
    """Calls a sampler on parameters in the working dtype."""
    wide = _working(b, b.outputs[0].dtype)
    return b.call_jax(sampler, *b.rng, *b.align(*parameters, dtype=wide))


@rule("aten::poisson")
def poisson(b: Builder, rate: Value, generator: None) -> Value:
    return _sample(b, _poisson, rate)


@rule("aten::_standard_gamma")
def standard_gamma(b: Builder, shape: Value, generator: None) -> Value:
    return _sample(b, _gamma, shape)


@rule("aten::_sample_dirichlet")
def sample_dirichlet(b: Builder, concentration: Value, generator: None) -> Value:
    return _sample(b, _dirichlet, concentration)


@rule("aten::binomial")
def binomial(b: Builder, count: Value, p: Value, generator: None) -> Value:
    return _sample(b, _binomial, count, p)


@jax_rule("aten::_standard_gamma_grad")
def standard_gamma_grad(shape: Any, sample: Any) -> Any:
    from jax import lax

    return lax.random_gamma_grad(shape, sample)
