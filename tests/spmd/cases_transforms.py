"""Constraints and gradients: how autograd and torch.func's transforms spread what they make."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import grid, sharded, spec_of
from models import MESH
from torch.utils._pytree import tree_map

import lazyxla
from tests.support import DEVICE


def test_constraints() -> None:
    x = grid(8, 6).requires_grad_()
    d = sharded(grid(8, 6), "data").requires_grad_()
    y = lazyxla.constrain(d * 2, MESH, (None, ("model", "data")))
    assert spec_of(y) == (None, ("model", "data"))
    (y * y).sum().backward()
    ((x * 2) ** 2).sum().backward()
    assert torch.equal(d.grad.cpu(), x.grad)
    plain = lazyxla.constrain(torch.ones(8, device=DEVICE), MESH, ("model",))
    assert spec_of(plain) == ("model",)


TRANSFORMS: dict[str, Callable[[Callable[..., torch.Tensor], torch.Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x + 1,)),
    "vjp of vmap": lambda f, x: torch.func.vjp(torch.func.vmap(f, in_dims=1), x)[1](x.mT),
    "vmap of jacrev": lambda f, x: torch.func.vmap(torch.func.jacrev(f), in_dims=1)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda y: f(y).sum())(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_constraints_within_transforms(name: str) -> None:
    def f(x: torch.Tensor, constrain: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return constrain((x * 2).sin()) * x

    x = torch.linspace(-1, 1, 8).reshape(4, 2)
    split = lambda y: lazyxla.constrain(y, MESH, ("data",))  # noqa: E731
    d = sharded(x.clone())
    actual = TRANSFORMS[name](lambda y: f(y, split), d)
    expected = TRANSFORMS[name](lambda y: f(y, lambda z: z), x)
    to_host = partial(tree_map, torch.Tensor.cpu)
    torch.testing.assert_close(to_host(actual), expected)


def test_the_batch_of_a_constraint_is_the_partitioners_to_split() -> None:
    d = sharded(grid(4, 8, 4))
    for dim in range(3):
        y = torch.vmap(lambda x: lazyxla.constrain(x, MESH, ("data",)), in_dims=dim)(d)
        assert spec_of(y)[1] == "data"


def test_tangents_are_constrained_as_values_are() -> None:
    d, split = sharded(grid(8, 6)), ("data",)
    y, tangent = torch.func.jvp(lambda x: lazyxla.constrain(x, MESH, split), (d,), (d * 2,))
    assert spec_of(y) == spec_of(tangent) == ("data", None)


def test_the_gradient_of_a_leaf_is_spread_as_it_is() -> None:
    w = sharded(torch.randn(8, 6), "model", "data").requires_grad_()
    lazyxla.shard(w, MESH, ("model", "data"))
    x = sharded(torch.randn(16, 8), "data")
    (x @ w).square().sum().backward()
    assert spec_of(w.grad) == ("model", "data")
    lazyxla.shard(w, MESH, ("data",))
    assert spec_of(w.grad) == ("data", None)
    assert spec_of(w) == ("data", None)


def test_tensors_within_transforms_have_no_memory_to_spread() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        lazyxla.shard(x, MESH, ("data",))
        return x.sum()

    with pytest.raises(RuntimeError, match="without memory of its own, as within torch"):
        torch.func.grad(loss)(torch.ones(8, device=DEVICE))
