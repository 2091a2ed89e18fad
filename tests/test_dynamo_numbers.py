"""Ints that vary between calls of a compiled function are inputs of its program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import lazyxla
from lazyxla.dynamo import backend
from tests.support import DEVICE, counted

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Function = Callable[[torch.Tensor, int], Any]

FUNCTIONS: dict[str, Function] = {
    "product": lambda x, n: x * n,
    "sum": lambda x, n: n + x,
    "alpha": lambda x, n: torch.add(x, x.sin(), alpha=n),
    "quotient": lambda x, n: (x / n, n / x),
    "float made of it": lambda x, n: x / (1 - 0.9**n),
    "several": lambda x, n: (x * n + n * 2, x - n / 3, x * (n * 0.5)),
    "the same twice": lambda x, n: x * n + (x + 1) * n,
    "integers": lambda x, n: (x * 4).long() * n // 3,
    "small integers": lambda x, n: ((x * 4).to(torch.int32) + n, (x > 0).sum() + n),
    "bool": lambda x, n: (x > 0) * n,
    "half": lambda x, n: x.half() * n,
    "0-dim tensor": lambda x, n: (x.sum() * n, x[0, 0].to(torch.int16) * n),
    "comparison": lambda x, n: (x * 4 < n, torch.arange(3, device=x.device) == n - 4),
    "mask": lambda x, n: x.masked_fill(torch.arange(3, device=x.device) < n - 4, n),
    "where": lambda x, n: torch.where(x > 0.5, x, n),
    "full": lambda x, n: torch.full((2, 3), n, device=x.device) + x,
    "full of a float": lambda x, n: torch.full((2, 3), n / 4, device=x.device) + x,
    "range": lambda x, n: torch.arange(n, n + 3, device=x.device) * x,
    "clamp": lambda x, n: (x * 8).clamp(max=n, min=-n),
    "written": lambda x, n: x.clone().add_(n).mul_(n),
    "number returned": lambda x, n: (x * n, n, n + 1, n / 2),
    "number and argument": lambda x, n: (x, n, x.sin()),
    "size and number": lambda x, n: x.repeat(1, 2)[:, : x.shape[1]] * n * x.shape[0],
    "on the CPU, too": lambda x, n: (x * n, torch.ones(2) * n, torch.tensor(1.5) * n),
    "on the host": lambda x, n: (torch.ops.aten._dirichlet_grad(x, x, x + 1) * n, x + n),
    "lerp": lambda x, n: torch.lerp(x, x.exp(), n / 10),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_int_that_varies_compiles_nothing(name: str) -> None:
    function = FUNCTIONS[name]
    compiled = torch.compile(function, backend=backend)
    x = torch.rand(2, 3) + 0.1
    ours = x.to(DEVICE)

    def call(number: int) -> None:
        results = compiled(ours, number)
        for mine, theirs in zip(_listed(results), _listed(function(x, number)), strict=True):
            assert type(mine) is type(theirs)
            if isinstance(mine, torch.Tensor):
                assert mine.dtype == theirs.dtype
                torch.testing.assert_close(mine.cpu(), theirs)
            else:
                assert mine == theirs

    # A constant, an input at its first value, an input that varies.
    for number in (5, 6, 7, 8):
        call(number)
    with counted() as n:
        for number in (4, 12, 9, 3):
            call(number)
    assert n.compiles == 0


def _listed(results: Any) -> list[Any]:
    return list(results) if isinstance(results, tuple) else [results]


def test_a_number_in_training_beside_sizes() -> None:
    def loss_of(x: torch.Tensor, weight: torch.Tensor, step: int) -> torch.Tensor:
        warm = 1 - 0.5**step
        return (F.linear(x, weight) * step).tanh().mul(warm).pow(2).sum() / (step + x.shape[0])

    compiled = torch.compile(loss_of, backend=backend)
    weight = torch.randn(4, 3, requires_grad=True)
    ours = weight.detach().to(DEVICE).requires_grad_()

    def train(rows: int, number: int) -> None:
        x = torch.randn(rows, 3)
        weight.grad = ours.grad = None
        expected = loss_of(x, weight, number)
        expected.backward()
        loss = compiled(x.to(DEVICE), ours, number)
        loss.backward()
        torch.testing.assert_close(loss.cpu(), expected)
        torch.testing.assert_close(ours.grad.cpu(), weight.grad)

    for number in range(1, 6):
        train(5, number)
    for number in range(3, 11):
        train(5 + number % 2, number)
    with counted() as n:
        for number in range(11, 16):
            train(5 + number % 2, number)
    assert n.compiles == 0


def test_a_number_of_a_compiled_optimizer() -> None:
    def update(parameter: torch.Tensor, grad: torch.Tensor, mean: torch.Tensor, step: int) -> None:
        mean.lerp_(grad, 0.1)
        parameter.add_(mean / (1 - 0.9**step), alpha=-0.1)

    compiled = torch.compile(update, backend=backend)
    tensors = [torch.randn(4), torch.zeros(4)]
    ours = [t.to(DEVICE) for t in tensors]
    compiles = 0
    for step in range(1, 10):
        grad = torch.randn(4)
        update(tensors[0], grad, tensors[1], step)
        with counted() as n:
            compiled(ours[0], grad.to(DEVICE), ours[1], step)
            lazyxla.sync()
        compiles += n.compiles if step > 4 else 0
        assert n.executions == 1
        torch.testing.assert_close([t.cpu() for t in ours], tensors)
    assert compiles == 0


@pytest.mark.parametrize("mode", [False, True, "fused"])
def test_a_number_in_each_mode(mode: bool | str) -> None:
    compiled = torch.compile(lambda x, n: (x * n, x.sin() + n / 2), backend=backend)
    x = torch.randn(3)
    ours = x.to(DEVICE)
    with lazyxla.eager_mode(mode):
        for number in (2, 5, 3, 8):
            product, other = compiled(ours, number)
            torch.testing.assert_close(product.cpu(), x * number)
            torch.testing.assert_close(other.cpu(), x.sin() + number / 2)
        with counted() as n:
            product, other = compiled(ours, 11)
            torch.testing.assert_close(product.cpu(), x * 11)
    assert n.compiles == 0
