"""Flax's modules as PyTorch's: trained by PyTorch's optimizers as by JAX."""

from __future__ import annotations

import copy
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import Tensor, nn

import lazyxla

DEVICE = "lazyxla"
RATE = 0.1
STEPS = 5


def make_nnx(dropout: float = 0.0) -> nnx.Module:
    rngs = nnx.Rngs(0)
    return nnx.Sequential(
        nnx.Linear(3, 8, rngs=rngs),
        nnx.BatchNorm(8, rngs=rngs),
        nnx.relu,
        nnx.Dropout(dropout, rngs=rngs),
        nnx.Linear(8, 2, rngs=rngs),
    )


class Linen(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = flax.linen.Dense(8)(x)
        x = flax.linen.BatchNorm(use_running_average=not train)(x)
        return flax.linen.Dense(2)(flax.linen.relu(x))


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(8, 3), torch.randn(8, 2)) for _ in range(STEPS)]


def train(model: nn.Module, **kwargs: Any) -> None:
    """A program per step, and none that is new from the third step on."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step, (x, y) in enumerate(batches()):
        lazyxla.sync(wait=True)
        before = lazyxla.counters()
        optimizer.zero_grad()
        (model(x.to(DEVICE), **kwargs) - y.to(DEVICE)).square().mean().backward()
        optimizer.step()
        lazyxla.sync(wait=True)
        after = lazyxla.counters()
        if step >= 2:
            assert after["executions"] - before["executions"] == 1
            assert after["compiles"] == before["compiles"]
    assert after["fallbacks"] == 0


def compare(model: nn.Module, expected: dict[str, Any]) -> None:
    ours = {name: x.cpu() for name, x in model.state_dict().items()}
    assert ours.keys() == expected.keys()
    torch.testing.assert_close(
        ours, {name: torch.from_numpy(np.array(x)) for name, x in expected.items()}
    )


def test_nnx() -> None:
    theirs = make_nnx()
    model = lazyxla.wrap_jax(theirs)
    names = {name for name, _ in model.named_parameters()}
    assert names == {f"layers.{i}" for i in ("0.kernel", "0.bias", "1.scale", "1.bias")} | {
        "layers.4.kernel",
        "layers.4.bias",
    }
    train(model)

    @nnx.jit
    def step(module: Any, x: Any, y: Any) -> None:
        gradients = nnx.grad(lambda m: jnp.mean((m(x) - y) ** 2))(module)
        new = jax.tree.map(lambda p, g: p - RATE * g, nnx.state(module, nnx.Param), gradients)
        nnx.update(module, new)

    theirs.train()
    for x, y in batches():
        step(theirs, x.numpy(), y.numpy())
    state: Any = nnx.to_pure_dict(nnx.state(theirs, (nnx.Param, nnx.BatchStat)))
    expected = {
        f"layers.{i}.{name}": value
        for i, layer in state["layers"].items()
        for name, value in layer.items()
    }
    rest = {n: x.cpu() for n, x in model.state_dict().items() if ".rngs." in n}
    compare(model, {**expected, **rest})
    model.eval()
    theirs.eval()
    x = batches()[0][0]
    torch.testing.assert_close(
        model(x.to(DEVICE)).detach().cpu(), torch.from_numpy(np.array(theirs(x.numpy())))
    )


def test_dropout_of_nnx() -> None:
    model = lazyxla.wrap_jax(make_nnx(dropout=0.5))
    x = torch.randn(8, 3, device=DEVICE)
    assert not model(x).equal(model(x))  # its counter goes on
    model.eval()
    assert model(x).equal(model(x))


def test_linen() -> None:
    module = Linen()
    variables = module.init(jax.random.key(0), jnp.ones((8, 3)))
    model = lazyxla.wrap_jax(module, variables)
    train(model, train=True)

    params, others = variables["params"], variables["batch_stats"]

    def loss(p: Any, others: Any, x: Any, y: Any) -> Any:
        given = {"params": p, "batch_stats": others}
        made, changed = module.apply(given, x, train=True, mutable=["batch_stats"])
        return jnp.mean((made - y) ** 2), changed["batch_stats"]

    for x, y in batches():
        gradients, others = jax.grad(loss, has_aux=True)(params, others, x.numpy(), y.numpy())
        params = jax.tree.map(lambda p, g: p - RATE * g, params, gradients)
    expected = {f"{layer}.{name}": x for layer, of in params.items() for name, x in of.items()}
    for layer, of in others.items():
        expected |= {f"batch_stats.{layer}.{name}": x for name, x in of.items()}
    compare(model, expected)
    model.eval()
    before = {name: x.clone() for name, x in model.named_buffers()}
    model(torch.randn(8, 3, device=DEVICE))
    assert all(x.equal(before[name]) for name, x in model.named_buffers())


def test_a_function_of_parameters() -> None:
    parameters = {"w": jnp.ones((3, 2)), "b": {"shift": jnp.zeros(2, jnp.bfloat16)}}
    model = lazyxla.wrap_jax(lambda p, x: x @ p["w"] + p["b"]["shift"], parameters)
    assert {n: p.dtype for n, p in model.named_parameters()} == {
        "w": torch.float32,
        "b.shift": torch.bfloat16,
    }
    x = torch.randn(4, 3)
    torch.testing.assert_close(model(x.to(DEVICE)).detach().cpu(), x @ torch.ones(3, 2))
    alone = lazyxla.wrap_jax(lambda p, x: x * p, jnp.full((), 2.0))
    assert [name for name, _ in alone.named_parameters()] == ["parameter"]


def test_state_dicts_and_copies() -> None:
    model = lazyxla.wrap_jax(make_nnx())
    other = lazyxla.wrap_jax(make_nnx())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    assert other.load_state_dict(model.state_dict()).missing_keys == []
    x = torch.randn(4, 3, device=DEVICE)
    expected = model.eval()(x)
    torch.testing.assert_close(other.eval()(x), expected)
    torch.testing.assert_close(copy.deepcopy(model)(x), expected)


def test_refused() -> None:
    with pytest.raises(TypeError, match="got a Linen without any"):
        lazyxla.wrap_jax(Linen())
    with pytest.raises(TypeError, match="on cpu"):
        lazyxla.wrap_jax(make_nnx())(torch.randn(4, 3))
