"""What several fusions compute is stored where that saves memory traffic, and computed once."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import lazyxla
from lazyxla import aot
from lazyxla.lowering.cpu import builder
from tests.support import DEVICE


def _reshaped(x: Tensor, layer: int, y: Callable[[Tensor], Tensor]) -> Tensor:
    """Every other residual connection is one of merged dimensions."""
    given = x.flatten(1, -2) if layer % 2 else x
    return (given + y(given)).reshape(x.shape)


def _transposed(x: Tensor, layer: int, y: Callable[[Tensor], Tensor]) -> Tensor:
    x = x.transpose(-2, -3)
    return x + y(x) * (x[:1] > 0)


def _plain(x: Tensor, layer: int, y: Callable[[Tensor], Tensor]) -> Tensor:
    return x + y(x)


KINDS = {
    "reshaped": (_reshaped, torch.float32),
    "reshaped, float64": (_reshaped, torch.float64),
    "transposed": (_transposed, torch.float32),
    "bfloat16": (_plain, torch.bfloat16),
    "reshaped, bfloat16": (_reshaped, torch.bfloat16),
}


def gradients(kind: str, *weights: Tensor) -> tuple[Tensor, ...]:
    """Of a network with residual connections, of a layer for each weight."""
    connect, _ = KINDS[kind]
    weights = tuple(weight.detach().requires_grad_() for weight in weights)
    x = weights[0].new_ones(2, 8, 8, 64) * torch.arange(8, device=weights[0].device)[:, None]
    for layer, weight in enumerate(weights):
        x = connect(x, layer, lambda x: F.layer_norm(x, (64,)).relu() @ weight)  # noqa: B023
    return torch.autograd.grad(x.float().square().mean(), weights)


def make_weights(kind: str, layers: int) -> list[Tensor]:
    return [torch.randn(64, 64).to(KINDS[kind][1]) / 8 for _ in range(layers)]


def most_operands(kind: str, layers: int) -> int:
    """Of a fusion in the compiled network."""
    weights = tuple(make_weights(kind, layers))
    text = aot.compile(lambda *weights: gradients(kind, *weights), weights).optimized_hlo()
    return max(operands.count("%") for operands in re.findall(r" fusion\(([^)]*)\)", text))


@pytest.mark.parametrize("kind", KINDS)
def test_fusions_do_not_grow_with_the_number_of_layers(kind: str) -> None:
    assert most_operands(kind, 12) <= most_operands(kind, 6)


@pytest.mark.parametrize("kind", ["reshaped", "bfloat16"])
def test_the_compiler_still_needs_this(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If both fail, the compiler compares costs: lowering/cpu/stored.py can go."""
    monkeypatch.setattr(builder, "store_shared_values", lambda b: None)
    assert most_operands(kind, 12) > most_operands(kind, 6)


@pytest.mark.parametrize("kind", KINDS)
def test_values(kind: str) -> None:
    weights = make_weights(kind, 4)
    found = gradients(kind, *(weight.to(DEVICE) for weight in weights))
    for ours, expected in zip(found, gradients(kind, *weights), strict=True):
        torch.testing.assert_close(ours.cpu(), expected)


def is_stored(function: Callable[..., object], inputs: int, *shape: int) -> bool:
    return "inlineable" in lazyxla.stablehlo(function, *(torch.randn(shape) for _ in range(inputs)))


def test_what_many_fusions_read_is_stored() -> None:
    def function(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> list[Tensor]:
        total = (a + b + c + d).reshape(-1)
        return [total.exp(), total.sin(), total.cos()]

    assert is_stored(function, 4, 64, 64)
    assert not is_stored(function, 4, 63, 64)  # fewer elements are computed anew


def test_what_one_fusion_reads_is_not_stored() -> None:
    """However often it reads it."""

    def function(*xs: Tensor) -> Tensor:
        for x in xs[1:]:
            total = xs[0] + x
            xs = (total * total.sin() + total.cos(), *xs[1:])
        return xs[0]

    assert not is_stored(function, 6, 64, 64)


def test_what_costs_no_more_to_compute_is_not_stored() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        shifted, joined = x - x[:1], torch.cat([x[:32], y[32:]])
        return [shifted.exp(), shifted.sin(), joined.exp(), joined.sin(), joined.cos()]

    assert not is_stored(function, 2, 64, 64)
