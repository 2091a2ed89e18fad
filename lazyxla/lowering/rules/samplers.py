"""Distributions that are sampled by rejection, with JAX's samplers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lazyxla.lowering.registry import jax_rule, rule
from lazyxla.lowering.rules.random import sampling_dtype
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from jax import Array

    from lazyxla.lowering.builder import Builder


def _key(seed: Array, ordinal: Array) -> Array:
    """A JAX key for the stream (seed, ordinal), two 0-dim uint64 arrays."""
    import jax
    import jax.numpy as jnp

    def halves(word: Array) -> tuple[Array, Array]:
        return (word >> 32).astype(jnp.uint32), word.astype(jnp.uint32)

    key = jax.random.wrap_key_data(jnp.stack(halves(seed)), impl="threefry2x32")
    high, low = halves(ordinal)
    return jax.random.fold_in(jax.random.fold_in(key, high), low)


def _poisson(seed: Array, ordinal: Array, rate: Array) -> Array:
    import jax
    import jax.numpy as jnp

    return jax.random.poisson(_key(seed, ordinal), rate, dtype=jnp.int64).astype(rate.dtype)


def _gamma(seed: Array, ordinal: Array, shape: Array) -> Array:
    import jax

    return jax.random.gamma(_key(seed, ordinal), shape, dtype=shape.dtype)


def _dirichlet(seed: Array, ordinal: Array, concentration: Array) -> Array:
    import jax

    return jax.random.dirichlet(_key(seed, ordinal), concentration, dtype=concentration.dtype)


def _binomial(seed: Array, ordinal: Array, count: Array, p: Array) -> Array:
    import jax

    return jax.random.binomial(_key(seed, ordinal), count, p, dtype=count.dtype)


def _sample(b: Builder, sampler: Callable[..., Any], *parameters: Value) -> Value:
    """Calls a sampler on parameters in the dtype to sample in."""
    dtype = sampling_dtype(b.outputs[0].dtype)
    sample: Value = b.call_jax(sampler, *b.rng, *b.align(*parameters, dtype=dtype))
    return sample


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
def standard_gamma_grad(shape: Array, sample: Array) -> Array:
    from jax import lax

    return lax.random_gamma_grad(shape, sample)
