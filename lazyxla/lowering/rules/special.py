"""Special functions, most of them JAX's."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.functions import erfc, exp, lgamma, sin, where
from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.formula import operands, pointwise
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from jax import Array

    from lazyxla.lowering.builder import Builder


# Operator -> function of jax.scipy.special (or jax.numpy), on operands in the dtype PyTorch
# computes in.
_JAX = {
    "aten::i0": "i0",
    "aten::special_i0e": "i0e",
    "aten::special_i1": "i1",
    "aten::special_i1e": "i1e",
    "aten::special_modified_bessel_i0": "i0",
    "aten::special_modified_bessel_i1": "i1",
    "aten::special_entr": "entr",
    "aten::special_log_ndtr": "log_ndtr",
    "aten::special_ndtri": "ndtri",
}
# The same for accelerators. For the CPU PyTorch's kernels are called (host_call.py): JAX's loops do
# not end where both arguments are large.
_JAX_ON_ACCELERATORS = {"aten::igamma": "gammainc", "aten::igammac": "gammaincc"}


@functools.cache
def _jax_function(name: str) -> Callable[..., Any]:
    """One object per function, so that its trace is cached."""

    def call(*xs: Array) -> Any:
        import jax.numpy as jnp
        from jax.scipy import special

        return (getattr(special, name, None) or getattr(jnp, name))(*xs)

    call.__name__ = name
    return call


def _by_jax(function: str) -> Callable[..., Value]:
    def lower(b: Builder, *args: Any) -> Value:
        return b.call_jax(_jax_function(function), *operands(b, *args))

    return lower


for _name, _function in _JAX.items():
    rule(_name)(_by_jax(_function))
for _name, _function in _JAX_ON_ACCELERATORS.items():
    rule(_name, platforms=("cuda", "tpu"))(_by_jax(_function))


def _gcd(x: Array, y: Array) -> Array:
    """By Euclid, step by step as PyTorch's kernel: jnp.gcd never ends for the least integer, which
    has no absolute value."""
    import jax.numpy as jnp
    from jax import lax

    def step(state: tuple[Array, Array]) -> tuple[Array, Array]:
        a, b = state
        some = a != 0
        return jnp.where(some, lax.rem(b, jnp.where(some, a, 1)), 0), jnp.where(some, a, b)

    return lax.while_loop(lambda s: jnp.any(s[0] != 0), step, (jnp.abs(x), jnp.abs(y)))[1]


@pointwise("aten::gcd")
def gcd(x: Value, y: Value) -> Value:
    return x.b.call_jax(_gcd, x, y)


@pointwise("aten::lcm")
def lcm(x: Value, y: Value) -> Value:
    divisor = gcd(x, y)
    if not x.dtype.is_signed:
        return x / where(divisor == 0, 1, divisor) * y
    product = abs(x) / where(divisor == 0, 1, divisor) * abs(y)
    return abs(product) if x.dtype.itemsize > 2 else product  # as C's int has it


@pointwise("aten::digamma")
def digamma(x: Value) -> Value:
    # At the poles: minus the sign of the zero times infinity, and nan for the negative integers.
    return where(x == 0, -math.inf / x * math.inf, x.call("chlo.digamma"))


def _zeta(x: Array, q: Array) -> Array:
    import jax.numpy as jnp
    from jax import lax
    from jax.scipy import special

    pole = (q <= 0) & (q == jnp.floor(q)) & (x > 1)
    # Too many terms to compute, or infinitely many if q is infinite.
    many = (q < -1e6) & ~pole
    start = jnp.where(pole | many | (x <= 1), 1, q)

    # Left of zero, where JAX's zeta is wrong: the terms one by one, beyond those of both signs,
    # since these cancel best in their order.
    def behind(q: Array) -> Array:
        return (start <= 0) & (q <= 9)

    def step(state: tuple[Array, Array]) -> tuple[Array, Array]:
        total, q = state
        return jnp.where(behind(q), total + q**-x, total), jnp.where(behind(q), q + 1, q)

    state = (jnp.zeros_like(start), start)
    total, q = lax.while_loop(lambda s: jnp.any(behind(s[1])), step, state)
    far = (q > 1e6) & (q < jnp.inf)  # where JAX's zeta underflows to zero
    ahead = q ** (1 - x) / (x - 1) * (1 + (x - 1) / (2 * q))
    total = jnp.where(far, ahead, total + special.zeta(x, jnp.where(far, 1, q)))
    return jnp.where(pole, jnp.inf, jnp.where(many & (x > 1), jnp.nan, total))


@pointwise(
    "aten::special_zeta", "aten::special_zeta.self_scalar", "aten::special_zeta.other_scalar"
)
def zeta(x: Value, q: Value) -> Value:
    """Hurwitz zeta, infinite at its poles q = 0, -1, -2, ..."""
    return x.b.call_jax(_zeta, x, q)


@pointwise("aten::polygamma")
def polygamma(order: int, x: Value) -> Value:
    if order == 0:
        return digamma(x)
    if order == 1:
        # Reflected to where the series of zeta converges.
        ratio = math.pi / sin(x * math.pi)
        mirrored = ratio * ratio - zeta(x.full(2), 1 - x)
        return where(x < 0.5, mirrored, where(x == math.inf, 0, zeta(x.full(2), x)))
    factorial = math.factorial(order) if order <= 170 else math.inf
    return zeta(x.full(order + 1), x) * (factorial if order % 2 else -factorial)


@pointwise("aten::mvlgamma")
def mvlgamma(x: Value, p: int) -> Value:
    constant = p * (p - 1) / 4 * math.log(math.pi)
    if p <= 16:  # four times as fast as a sum along a dimension
        return sum((lgamma(x - j / 2) for j in range(p)), x.full(constant))
    halves = x.b.iota([*x.shape, p], x.rank, x.dtype) / 2
    return lgamma(x.b.unsqueeze(x, -1) - halves).sum([x.rank]) + constant


@pointwise("aten::special_erfcx")
def erfcx(x: Value) -> Value:
    """exp(x**2) erfc(x): directly where both factors are finite, else by its asymptotic series."""
    square = x * x
    # The sum of (-1)**n (2n - 1)!! / (2 x**2)**n.
    term, series = x.full(1.0), x.full(1.0)
    for n in range(1, 10):
        term = term * (1 - 2 * n) / (2 * square)
        series = series + term
    limit = 20 if x.dtype == torch.float64 else 8
    direct = exp(square) * erfc(x)
    return where(x > limit, series / (x * math.sqrt(math.pi)), direct)


def _split(x: Array) -> tuple[Array, Array]:
    import jax.numpy as jnp

    return jnp.frexp(x)


@rule("aten::frexp.Tensor")
def frexp(b: Builder, x: Value) -> list[Value]:
    return b.call_jax(_split, x.accumulated())
