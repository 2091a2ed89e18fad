"""Assertions about values in compiled functions: left out, unless values are to be checked."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import lazyxla
from tests.support import DEVICE, assert_same, counted

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_step_with_classes_is_one_program() -> None:
    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        chosen = F.one_hot((x @ weight).argmax(1), 3)
        return (chosen * (x @ weight)).square().mean()

    x, weight = torch.randn(5, 4), torch.randn(4, 3, requires_grad=True)
    loss(x, weight).backward()
    compiled = torch.compile(loss, backend="lazyxla", fullgraph=True)
    ours, parameter = x.to(DEVICE), weight.detach().to(DEVICE).requires_grad_()
    lazyxla.sync()
    with counted() as n:
        compiled(ours, parameter).backward()
        lazyxla.sync()
    assert (n.executions, n.nodes_recorded, n.fallbacks) == (1, 3, 0)
    assert_same(parameter.grad, weight.grad)


def test_classes_in_a_branch() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(
            x.sum() > 0,
            lambda x: F.one_hot(x.argmax(1), 4) + x,
            lambda x: x * 2,
            (x,),
        )

    x = torch.rand(3, 4)
    ours = x.to(DEVICE)
    compiled = torch.compile(function, backend="lazyxla", fullgraph=True)
    with counted() as n:
        result = compiled(ours)
        lazyxla.sync()
    assert (n.executions, n.nodes_recorded, n.fallbacks) == (1, 1, 0)
    assert_same(result, function(x))


def test_assertion_where_values_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x > 0).all(), "x has to be positive")
        return x + 1

    x = torch.tensor([1.0, -1.0])
    compiled = torch.compile(function, backend="lazyxla")
    assert_same(compiled(x.to(DEVICE)), x + 1)
    torch._dynamo.reset()
    monkeypatch.setattr(lazyxla.settings, "check_indices", True)
    with pytest.raises(RuntimeError, match="x has to be positive"):
        torch.compile(function, backend="lazyxla")(x.to(DEVICE)).cpu()
