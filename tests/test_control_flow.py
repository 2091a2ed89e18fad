"""PyTorch's control flow: part of one program, whichever mode, with values and gradients as on the
CPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import lazyxla
from lazyxla import control_flow, lowering

DEVICE = "lazyxla"

# Dynamo, which traces them for PyTorch, gives up on code that it has traced for many functions.
pytestmark = pytest.mark.usefixtures("uncut", "fresh_dynamo")


def branches(x: Tensor, y: Tensor) -> Any:
    return torch.cond(
        x.sum() > 0, lambda a, c: (a.sin() @ c, a * 2), lambda a, c: (a.cos() @ c, a + 1), (x, y)
    )


def other_branch(x: Tensor, y: Tensor) -> Any:
    return branches(-x, y)


def nested(x: Tensor, y: Tensor) -> Any:
    def inner(a: Tensor) -> Any:
        return torch.cond(a.sum() > 100, lambda b: b.sin(), lambda b: b.cos(), (a,))

    return torch.cond(x.sum() > 0, lambda a, c: inner(a) * c, lambda a, c: a - c, (x, y))


def scanned(x: Tensor, y: Tensor) -> Any:
    return scan(lambda carry, row: (carry + row.sin(), carry * row), y[0], x)


def mapped(x: Tensor, y: Tensor) -> Any:
    return torch_map(lambda row, z: row * z, x, y[0] * 1)


def summed(x: Tensor, y: Tensor) -> Any:
    return associative_scan(lambda a, b: a + b, x * y, 0, combine_mode="generic")


def halved(x: Tensor, y: Tensor) -> Any:
    """As often as it takes: how often is known on the device only."""
    return while_loop(
        lambda n, z: z.abs().sum() > 1,
        lambda n, z: (n + 1, z / 2),
        (torch.zeros((), dtype=torch.int64, device=x.device), x + y),
    )


DIFFERENTIABLE = [branches, other_branch, nested, scanned, mapped, summed]
ALL = [*DIFFERENTIABLE, halved]


def run(function: Callable[..., Any], device: str, gradients: bool) -> Any:
    torch.manual_seed(0)
    x, y = (torch.rand(3, 3).to(device).requires_grad_(gradients) for _ in range(2))
    found: list[Any] = []
    for _ in range(3):
        if device != "cpu":
            before = lazyxla.counters()
        results = function(x, y)
        leaves = torch.utils._pytree.tree_leaves(results)
        if gradients:
            total = sum(leaf.square().sum() for leaf in leaves)
            leaves += torch.autograd.grad(total, (x, y), allow_unused=True, materialize_grads=True)
        found.append(leaves)
        if device != "cpu":
            lazyxla.sync(wait=True)
            after = lazyxla.counters()
            counted = {name: after[name] - before[name] for name in after}
    if device != "cpu":
        assert counted["executions"] == 1
        assert counted["compiles"] == counted["fallbacks"] == counted["downloads"] == 0
    return [[leaf.detach().cpu() for leaf in leaves] for leaves in found]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("function", ALL, ids=lambda f: f.__name__)
def test_values(function: Callable[..., Any], compiled: bool) -> None:
    ours = torch.compile(function, backend="lazyxla") if compiled else function
    torch.testing.assert_close(run(ours, DEVICE, False), run(function, "cpu", False))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("function", DIFFERENTIABLE, ids=lambda f: f.__name__)
def test_gradients(function: Callable[..., Any], compiled: bool) -> None:
    ours = torch.compile(function, backend="lazyxla") if compiled else function
    torch.testing.assert_close(run(ours, DEVICE, True), run(function, "cpu", True))


@pytest.mark.parametrize("function", [branches, scanned, halved], ids=lambda f: f.__name__)
def test_eager(function: Callable[..., Any]) -> None:
    x, y = torch.rand(3, 3), torch.rand(3, 3)
    with lazyxla.eager_mode(True):
        ours = function(x.to(DEVICE), y.to(DEVICE))
        torch.testing.assert_close([t.cpu() for t in ours], list(function(x, y)))


def operations(length: int) -> Counter[str]:
    with lazyxla.aot.capture() as programs:
        x = torch.ones(length, 3, device=DEVICE)
        total = scan(lambda carry, row: (carry + row.sin(), carry * row), x[0], x)
        lazyxla.sync()
    assert total[1].shape == (length, 3)
    text = lowering.lower_to_text(programs[-1].program, "cpu")
    return Counter(re.findall(r"stablehlo\.(\w+)", text))


def test_a_loop_is_in_the_program_once() -> None:
    few, many = operations(4), operations(400)
    assert few == many
    assert few["while"] == 1


@pytest.mark.parametrize("function", [branches, scanned, mapped], ids=lambda f: f.__name__)
def test_sizes_that_change(function: Callable[..., Any]) -> None:
    """PyTorch then traces with symbols for sizes, which are operands."""
    for size in (3, 4, 5):
        x, y = torch.rand(size, size), torch.rand(size, size)
        before = lazyxla.counters()["downloads"]
        ours = function(x.to(DEVICE), y.to(DEVICE))
        assert lazyxla.counters()["downloads"] == before
        torch.testing.assert_close(
            torch.utils._pytree.tree_map(lambda t: t.cpu(), ours), function(x, y)
        )


def test_what_cannot_be_lowered_is_as_pytorch_does_it() -> None:
    """Its counter is on the CPU or a number, or a branch draws random numbers."""
    x = torch.rand(3, device=DEVICE)

    def counted(start: Any) -> Any:
        return while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, z * 2), (start, x))

    number, result = counted(torch.tensor(0))
    assert number.device.type == "cpu"
    torch.testing.assert_close(result.cpu(), x.cpu() * 8)
    number, result = counted(0)
    assert number == 3
    torch.testing.assert_close(result.cpu(), x.cpu() * 8)
    drawn = torch.cond(x.sum() > -1, lambda a: torch.rand_like(a), lambda a: a + 1, (x,))
    assert ((drawn >= 0) & (drawn < 1)).all()


def test_branches_may_return_other_shapes() -> None:
    x = torch.rand(3)
    for is_true in (True, False):
        ours, theirs = (
            torch.cond(torch.tensor(is_true, device=d), lambda a: a * 2, lambda a: a[:2] * 3, [y])
            for d, y in ((DEVICE, x.to(DEVICE)), ("cpu", x))
        )
        torch.testing.assert_close((ours + 1).cpu(), theirs + 1)


def test_a_captured_tensor_is_no_constant() -> None:
    captured, x = torch.ones(3, device=DEVICE), torch.rand(3, device=DEVICE)
    predicate = x.sum() > -1

    def add(a: Tensor) -> Any:
        return (a + captured,)

    def double(a: Tensor) -> Any:
        return (a * 2,)

    for _ in range(3):
        (result,) = torch.ops.higher_order.cond(predicate, add, double, (x,))
        torch.testing.assert_close(result.cpu(), x.cpu() + captured.cpu())
        captured.add_(1)


def test_what_a_program_is_told_by_is_its_content() -> None:
    """Closures that are made anew in each step, and other ones of the same kind."""
    x = torch.rand(3, device=DEVICE)
    new = []
    for function in (torch.sin, torch.sin, torch.cos):
        before = len(control_flow.by_name)
        y = torch.cond(x.sum() > -1, lambda a, f=function: f(a), lambda a: a + 1, (x,))
        torch.testing.assert_close(y.cpu(), function(x.cpu()))
        new.append(len(control_flow.by_name) - before)
    assert new == [1, 0, 1]
