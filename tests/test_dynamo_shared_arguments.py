"""Compiled functions that write to arguments which share memory: differently in each call."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from lazyxla.dynamo import backend
from tests.support import DEVICE, assert_same, counted

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Pair = tuple[torch.Tensor, torch.Tensor]

PAIRS: dict[str, Callable[[torch.Tensor], Pair]] = {
    "two storages": lambda x: (x[:4].clone(), x[4:8].clone()),
    "apart": lambda x: (x[:4], x[8:]),
    "the same": lambda x: (x[:4], x[:4]),
    "one further": lambda x: (x[:4], x[1:5]),
    "two further": lambda x: (x[:4], x[2:6]),
    "one before": lambda x: (x[1:5], x[:4]),
}


def write_first(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * y


def write_both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    z = x + y
    y.add_(z)
    return z * x


def check(
    compiled: Callable[..., torch.Tensor], function: Callable[..., torch.Tensor], pair: str
) -> None:
    """Compares a call's result and its arguments."""
    theirs = PAIRS[pair](torch.arange(12.0))
    ours = PAIRS[pair](torch.arange(12.0).to(DEVICE))
    assert_same(compiled(*ours), function(*theirs))
    for our, their in zip(ours, theirs, strict=True):
        assert_same(our, their)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("first", PAIRS)
@pytest.mark.parametrize("function", [write_first, write_both])
def test_memory_that_is_shared_otherwise(
    function: Callable[..., torch.Tensor], first: str, dynamic: bool
) -> None:
    compiled = torch.compile(function, backend=backend, dynamic=dynamic)
    for pair in (first, *PAIRS, first):
        check(compiled, function, pair)


def test_only_what_overlaps_otherwise_is_recorded(caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(write_both, backend=backend, dynamic=False)
    check(compiled, write_both, "two storages")
    pair = PAIRS["two storages"](torch.arange(12.0).to(DEVICE))
    with counted() as n:
        compiled(*pair)
    assert n.nodes_recorded == 1
    caplog.set_level(logging.INFO, "lazyxla")
    check(compiled, write_both, "apart")
    assert "overlap otherwise" not in caplog.text
    check(compiled, write_both, "one further")
    assert caplog.text.count("overlap otherwise") == 1
    torch.compiler.reset()
    for _ in range(2):
        check(compiled, write_both, "one further")  # as it was compiled
    assert caplog.text.count("overlap otherwise") == 1


def test_nothing_is_compared_where_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from lazyxla import _C

    def refuse(*args: object) -> None:
        raise AssertionError("asks which arguments share memory")

    monkeypatch.setattr(_C, "shared_arguments", refuse)
    compiled = torch.compile(lambda x, y: x * y + 1, backend=backend)
    x = torch.arange(12.0).to(DEVICE)
    assert_same(compiled(x[:4], x[1:5]), torch.arange(4.0) * torch.arange(1.0, 5) + 1)


def test_gradients_of_memory_that_is_shared_otherwise() -> None:
    def function(weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return (weight * (x + y)).sum()

    compiled = torch.compile(function, backend=backend, dynamic=False)
    for pair in PAIRS:
        gradients = []
        for device, call in ((DEVICE, compiled), ("cpu", function)):
            weight = torch.ones(4, device=device, requires_grad=True)
            call(weight, *PAIRS[pair](torch.arange(12.0).to(device))).backward()
            gradients.append(weight.grad)
        assert_same(*gradients)
