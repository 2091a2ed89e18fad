"""Distributions that are sampled by rejection, with JAX's samplers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

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


def _draw(seed: Array, ordinal: Array, *parameters: Array, sampler: str) -> Array:
    import jax

    dtype = parameters[0].dtype
    draw, drawn = getattr(jax.random, sampler), "int64" if sampler == "poisson" else dtype
    result = draw(_key(seed, ordinal), *parameters, dtype=drawn)
    return result.astype(dtype)


def _sampled(sampler: str) -> Callable[..., Value]:
    """A rule: its arguments are the distribution's parameters and a generator, which is None."""

    def lower(b: Builder, *args: Value | None) -> Value:
        dtype = sampling_dtype(b.outputs[0].dtype)
        parameters = b.align(*(x for x in args if x is not None), dtype=dtype)
        return b.call_jax(_draw, *b.rng, *parameters, sampler=sampler)  # type: ignore[no-any-return]

    return lower


rule("aten::poisson")(_sampled("poisson"))
rule("aten::_standard_gamma")(_sampled("gamma"))
rule("aten::_sample_dirichlet")(_sampled("dirichlet"))
rule("aten::binomial")(_sampled("binomial"))


@jax_rule("aten::_standard_gamma_grad")
def standard_gamma_grad(shape: Array, sample: Array) -> Array:
    from jax import lax

    return lax.random_gamma_grad(shape, sample)
