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


def test_classes_where_values_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.one_hot(x, 4) + 1

    bad = torch.tensor([1, 7], device=DEVICE)
    torch.compile(function, backend="lazyxla")(bad)
    torch._dynamo.reset()
    monkeypatch.setattr(lazyxla.settings, "check_indices", True)
    with pytest.raises(RuntimeError, match="Class values must be smaller than num_classes"):
        torch.compile(function, backend="lazyxla")(bad).cpu()


@pytest.mark.parametrize("within", [False, True])
def test_assertions_of_the_program_itself_are_kept(within: bool) -> None:
    def asserted(x: torch.Tensor) -> torch.Tensor:
        # What Dynamo makes of an assert; pytest has rewritten those of this file.
        torch._assert_async((x > 0).all(), "x has to be positive")
        return F.one_hot(x.argmax(1), 4) + x

    def function(x: torch.Tensor) -> torch.Tensor:
        if not within:
            return asserted(x)
        return torch.utils.checkpoint.checkpoint(asserted, x, use_reentrant=False)

    x = torch.rand(3, 4) + 1
    compiled = torch.compile(function, backend="lazyxla", fullgraph=True)
    assert_same(compiled(x.to(DEVICE)), function(x))
    with pytest.raises(RuntimeError, match="x has to be positive"):
        compiled(-x.to(DEVICE)).cpu()
