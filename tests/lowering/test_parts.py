"""Sums of rows in parts: what is summed is computed in the parts' shape."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import lazyxla
from lazyxla.lowering.cpu import builder, kernel_limits, parts, sums
from tests.support import DEVICE

CASES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "mean": (lambda x: (x * x).mean(), (31, 77, 79)),
    "of a few long rows": (lambda x: x.flatten(1).std(1), (4, 31, 77, 79)),
    "logsumexp": (lambda x: x.logsumexp(-1), (80, 9000)),
    "softmax": (lambda x: x.softmax(-1), (64, 8200)),
    "variance": (lambda x: x.var((2, 3)), (2, 32, 72, 72)),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), (2, 32, 72, 72)),
    "group norm": (lambda x: F.group_norm(x, 8), (8, 32, 40, 41)),
    "layer norm": (lambda x: F.layer_norm(x, (5, 9, 200)), (70, 5, 9, 200)),
}


def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (found,) = torch.autograd.grad(function(x).square().sum(), x)
    return found


@pytest.mark.parametrize("name", CASES)
def test_no_computed_value_changes_its_shape_to_be_summed(name: str) -> None:
    function, shape = CASES[name]
    x = torch.randn(shape)
    text = lazyxla.stablehlo(lambda x: (function(x), gradient(function, x)), x.to(DEVICE))
    defined = dict(re.findall(r"(%\w+) = (.*)", text))
    summed = re.findall(r"stablehlo.dot_general (%\w+),", text)
    assert summed
    for value in summed:
        while "stablehlo.reshape" in defined.get(value, ""):
            value = re.findall(r"stablehlo.reshape (%\w+)", defined[value])[0]
            assert not re.match(r"stablehlo\.(subtract|multiply|exp)", defined.get(value, ""))
    for of in (function, lambda x: gradient(function, x)):
        torch.testing.assert_close(of(x.to(DEVICE)).cpu(), of(x))


FOUND: dict[str, Callable[[Tensor], Tensor]] = {
    "gather": lambda x: x.gather(0, (x > 0).long()),
    "slice": lambda x: x[:, 1:],
    "transposition": lambda x: x.mT,
    "reversal": lambda x: x.flip(0),
    "concatenation": lambda x: torch.cat([x, x]),
    "indices": lambda x: x * torch.arange(x.numel(), device=x.device).view(x.shape),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found_by_its_index_is_not_summed_in_parts(name: str) -> None:
    """XLA would divide for each element to find it."""
    x = torch.randn(8, 90, 100)

    def total(x: Tensor, find: Callable[[Tensor], Tensor]) -> Tensor:
        return (find(x) * 2 + 1).sum()

    text = lazyxla.stablehlo(lambda x: total(x, FOUND[name]), x.to(DEVICE))
    assert "stablehlo.dot_general" not in text
    assert "dot_general" in lazyxla.stablehlo(lambda x: total(x, torch.neg), x.to(DEVICE))
    torch.testing.assert_close(total(x.to(DEVICE), FOUND[name]).cpu(), total(x, FOUND[name]))


class RandomSum:
    """A sum over the last dimensions of a value that is computed in several shapes."""

    def __init__(self, seed: int, device: str) -> None:
        self._choose = random.Random(seed)
        self._numbers = torch.Generator().manual_seed(seed)
        self._device = device
        self._elements = self._choose.choice([48, 60, 72])

    def sum(self) -> Tensor:
        shape = self._shape()
        first = self._choose.randrange(len(shape))
        return self._value(shape, depth=4).sum(tuple(range(first, len(shape))))

    def _shape(self) -> list[int]:
        left, shape = self._elements, list[int]()
        while left > 1 or self._choose.random() < 0.3:
            size = self._choose.choice([n for n in range(1, left + 1) if left % n == 0])
            left //= size
            shape.append(size)
        return shape

    def _value(self, shape: list[int], depth: int) -> Tensor:
        kind = self._choose.choice(["binary", "binary", "unary", "where", "reshape"])
        if depth == 0:
            return self._repeated(shape)
        x = self._value(self._shape() if kind == "reshape" else shape, depth - 1)
        if kind == "reshape":
            return x.reshape(shape)
        if kind == "unary":
            return self._choose.choice([torch.neg, torch.abs, torch.relu])(x)
        y = self._value(shape, self._choose.randrange(depth))
        if kind == "where":
            return torch.where(x > y, x, y + 1)
        return self._choose.choice([torch.add, torch.sub, torch.maximum])(x, y)

    def _repeated(self, shape: list[int]) -> Tensor:
        """Integers, whose sums are exact, along some of the dimensions."""
        sizes = [self._choose.choice([1, n]) for n in shape]
        x = torch.randint(-9, 9, sizes, generator=self._numbers).float()
        return x.to(self._device).expand(shape)


def test_values_are_those_of_sums_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "_LEAST_ROWS": 1,
        "_MOST_ADDED": 7,
        "_LONG_PART": 3,
        "_SHORT_PART": 2,
    }.items():
        monkeypatch.setattr(sums, name, value)
    programs: list[object] = []
    compute = parts.compute_in_parts
    monkeypatch.setattr(builder, "compute_in_parts", lambda b: programs.append(compute(b)))
    got = [RandomSum(seed, DEVICE).sum() for seed in range(30)]
    before = lazyxla.counters()["executions"]
    lazyxla.sync()
    assert lazyxla.counters()["executions"] == before + 1
    assert len(programs) == 1
    for seed, value in enumerate(got):
        torch.testing.assert_close(value.cpu(), RandomSum(seed, "cpu").sum(), rtol=0, atol=0)


def test_operands_of_other_matmuls_are_computed_once() -> None:
    """In one shape, which other readers share."""

    def run(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = F.relu(x).sigmoid()
        return F.linear(y, w), y + 1, (x * x).sum()

    x, w = torch.randn(4, 80, 128), torch.randn(8, 128)
    with kernel_limits.using({}):
        text = lazyxla.stablehlo(run, x.to(DEVICE), w.to(DEVICE))
    assert text.count("stablehlo.logistic") == 1
    assert text.count("stablehlo.dot_general") == 2  # the linear layer, and the sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_another_width_are_not_reshaped(dtype: torch.dtype) -> None:
    """Random numbers are halves of wider ones: what they mask is read by sums and matmuls."""
    x = torch.ones(4, 16, 64, 2, dtype=dtype, device=DEVICE)
    w = torch.ones(5, 64 * 32, device=DEVICE, dtype=dtype)
    y = F.dropout(x, 0.5)
    kept, total, product = y / 2, y.float().sum(), F.linear(y.view(4, -1), w)
    count = kept.float().cpu().sum()
    assert 0 < count < kept.numel()
    torch.testing.assert_close(total.cpu(), 2 * count)
    sums = 2 * kept.float().cpu().sum((1, 2, 3))
    torch.testing.assert_close(product[:, 0].cpu(), sums.to(dtype))


def test_a_chain_may_be_deeper_than_pythons_stack() -> None:
    x = torch.randn(64, 8200).round()
    y = x.to(DEVICE)
    for _ in range(3001):
        y = -y
    torch.testing.assert_close(y.sum(-1).cpu(), -x.sum(-1))
