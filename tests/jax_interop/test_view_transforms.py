"""PyTorch's functions in JAX under its transformations, in any order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor

import lazyxla
from tests.jax_interop.exporting import arrays

jax.config.update("jax_platforms", "cpu")

pytestmark = pytest.mark.usefixtures("fresh_dynamo")  # which PyTorch's control flow takes


Pair = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def start(choose: random.Random) -> Pair:
    """A function of JAX's on arrays (3,), and the same of PyTorch's in JAX."""
    a, b = choose.uniform(0.5, 1), choose.uniform(0.1, 0.5)
    view = lazyxla.jax_view(lambda x: torch.sin(x * a) + x.roll(1) * b)
    return (lambda x: jnp.sin(x * a) + jnp.roll(x, 1) * b), view


def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: jax.grad(lambda v: (f(v) ** 2).sum())(x)


def tangent(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1]


def batched(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: jax.vmap(f, in_axes=1, out_axes=1)(jnp.stack([x, x * 2], 1)).sum(1)


def scanned(f: Callable[..., Any]) -> Callable[..., Any]:
    def step(carry: Any, scale: Any) -> Any:
        following = f(carry) * scale
        return following, following

    return lambda x: jax.lax.scan(step, x, jnp.array([0.5, 0.25]))[1].sum(0)


def branched(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: jax.lax.cond(x.sum() > 0, f, lambda v: f(-v), x)


def rematerialised(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.checkpoint(f)


TRANSFORMS = [jax.jit, gradient, tangent, batched, scanned, branched, rematerialised]


@pytest.mark.parametrize("seed", range(12))
def test_transformations_in_any_order(seed: int) -> None:
    choose = random.Random(seed)
    expected, ours = start(choose)
    names = []
    for _ in range(choose.randint(2, 4)):
        transform = choose.choice(TRANSFORMS)
        names.append(transform.__name__)
        expected, ours = transform(expected), transform(ours)
    x = jnp.array([0.3, -0.2, 0.7])
    both = (torch.from_numpy(np.array(function(x))) for function in (ours, expected))
    torch.testing.assert_close(*both, msg=lambda text: f"{names}: {text}")


def test_the_backward_in_one_program_does_not_compute_the_forward_again() -> None:
    def pytorch(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w).tanh() @ w).sum()

    def in_jax(x: Any, w: Any) -> Any:
        return (jnp.tanh(x @ w) @ w).sum()

    def products(function: Any) -> int:
        compiled = jax.jit(jax.value_and_grad(function, 1)).lower(*arrays((64, 64), (64, 64)))
        return compiled.compile().as_text().count(" dot(")

    assert products(lazyxla.jax_view(pytorch)) <= products(in_jax)
