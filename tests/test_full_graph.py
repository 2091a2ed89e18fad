"""full_graph and max_graphs: what breaks a compiled region is named or counted."""

from __future__ import annotations

import re
import traceback

import pytest
import torch

import lazyxla
from tests.support import DEVICE, assert_same, counted, on_host

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("modes_stay_as_they_are")]


BREAKS = {
    "item": (lambda y: y.sum().item(), "a value is read"),
    "if": (lambda y: 1 if y.sum() > 0 else 0, "a value is read"),
    "cpu": (lambda y: y.cpu(), "a value is read"),
    "print": (lambda y: str(y), "a value is read"),
    "host": (lambda y: on_host(y), "lazyxla_tests::on_host runs on the host"),
    "shape": (lambda y: y.nonzero(), "aten::nonzero runs on the host"),
    "sync": (lambda y: lazyxla.sync(), r"lazyxla.sync\(\) is called"),
    "mode": (lambda y: lazyxla.eager_mode(True), "the mode changes"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_full_graph_names_the_line_that_breaks_it(name) -> None:
    action, reason = BREAKS[name]
    kept = []

    @lazyxla.compile(full_graph=True, name="whole")
    def whole(x: torch.Tensor) -> None:
        kept.append(x * 2)
        action(kept[0])

    x = torch.randn(3, 3).to(DEVICE)
    line = action.__code__.co_firstlineno
    with pytest.raises(RuntimeError) as error:
        whole(x)
    # PyTorch's frame that prints has a variable that turns functorch off as long as it lives.
    traceback.clear_frames(error.tb)
    text = str(error.value).split("\nException raised from")[0]
    pattern = (
        rf"lazyxla: \S*test_full_graph.py:{line}: the compiled region whole has full_graph=True, "
        rf"but would break into two programs: {reason} before it ends"
    )
    assert re.fullmatch(pattern, text), text
    assert_same(kept[0], x.cpu() * 2)


def test_full_graph_of_an_inner_or_outer_region_counts() -> None:
    x = torch.randn(3).to(DEVICE)
    inner = lazyxla.compile(lambda value: value.sum().item())
    with pytest.raises(RuntimeError, match="the compiled region outer has full_graph=True"):
        lazyxla.compile(lambda value: inner(value + 1), full_graph=True, name="outer")(x)
    strict = lazyxla.compile(lambda value: (value + 2).sum().item(), full_graph=True, name="strict")
    with pytest.raises(RuntimeError, match="the compiled region strict has full_graph=True"):
        lazyxla.compile(lambda value: strict(value))(x)


def test_full_graph_holds_in_the_backward_pass() -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient * gradient.sum().item()

    x = torch.randn(3, device=DEVICE, requires_grad=True)
    with (
        pytest.raises(RuntimeError, match=r"test_full_graph.py:.* a value is read before it ends"),
        lazyxla.compile(full_graph=True),
    ):
        Reads.apply(x).sum().backward()


def test_full_graph_without_a_break() -> None:
    @lazyxla.compile(full_graph=True)
    def whole(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 2:
            return x.softmax(0)
        return x

    x = torch.randn(3).to(DEVICE)
    x.tolist()  # not in the region
    with counted() as n:
        result = whole(x)
    assert n.executions == 1
    torch.testing.assert_close(result.cpu(), x.cpu().softmax(0))


def test_max_graphs() -> None:
    @lazyxla.compile(max_graphs=2, name="limited")
    def limited(x: torch.Tensor) -> torch.Tensor:
        return x.cosh() - 1

    for rows in (3, 4, 3, 4):
        limited(torch.randn(rows).to(DEVICE))
    x = torch.randn(5).to(DEVICE)
    kept = []
    with pytest.raises(
        RuntimeError,
        match="the compiled region limited needs another program than the 2 that it has, and "
        r"max_graphs allows no more\. Why: a new graph: like one before, but input 0 is "
        r"Float\[5\], not Float\[4\]",
    ):
        kept.append(limited(x))
    limited(torch.randn(4).to(DEVICE))
    # Outside of the region nothing forbids it.
    torch.testing.assert_close((x.cosh() - 1).cpu(), x.cpu().cosh() - 1)


def test_max_graphs_loses_nothing() -> None:
    x, kept = torch.randn(2, 3).to(DEVICE), []
    block = lazyxla.compile(max_graphs=1)
    with block:
        x.add_(1)
    with (
        pytest.raises(RuntimeError, match="the compiled region block needs another program"),
        block,
    ):
        kept.append(x.sinh())
    assert_same(kept[0], x.cpu().sinh())


@pytest.mark.parametrize("count", [0, -1])
def test_max_graphs_must_allow_one(count) -> None:
    with pytest.raises(ValueError, match=f"max_graphs must be at least 1, got {count}"):
        lazyxla.compile(lambda x: x, max_graphs=count)


def test_arguments_of_other_types() -> None:
    with pytest.raises(TypeError, match=r"max_graphs must be an integer, got 1\.5"):
        lazyxla.compile(max_graphs=1.5)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="name must be a string, got 5"):
        lazyxla.compile(name=5)  # type: ignore[call-overload]


def test_messages_tell_the_name(caplog) -> None:
    with caplog.at_level("INFO", logger="lazyxla"), lazyxla.compile(name="update"):
        _ = torch.randn(3, 5).to(DEVICE).atan()
    assert "(update: a new graph" in caplog.text
