"""torch.compile with sizes that have bounds: one program per bucket, results of exact sizes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lazyxla
from lazyxla.dynamo import backend
from lazyxla.dynamo.padding.plans import halvings
from lazyxla.lowering import registry
from tests.support import DEVICE, counted, programs

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Dims = list[tuple[int, int]]
"""Which dimensions have bounds: the argument's position, and the dimension."""


class Refusals(logging.Handler):
    """What the log tells of graphs that are not padded."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "not padded" in record.getMessage():
            self.texts.append(record.getMessage())


@contextmanager
def refusals() -> Iterator[list[str]]:
    logger, handler = logging.getLogger("lazyxla"), Refusals()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def bounded(args: tuple[Any, ...], dims: Dims, least: int = 2, most: int = 64) -> list[Any]:
    """Copies on the device, with bounds."""
    ours = [a.detach().to(DEVICE).requires_grad_(a.requires_grad) for a in args]
    for position, dim in dims:
        torch._dynamo.mark_dynamic(ours[position], dim, min=least, max=most)
    return ours


@contextmanager
def graphs_made(counts: list[int]) -> Iterator[None]:
    """Notes how many graphs, each for a bucket, a block makes."""
    before = set(registry.graphs)
    yield
    counts.append(len(set(registry.graphs) - before))


Make = Callable[..., tuple[torch.Tensor, ...]]
Loss = Callable[..., torch.Tensor]


def train(
    model: nn.Module,
    loss: Loss,
    make: Make,
    dims: Dims,
    sizes: list[tuple[int, ...]],
    most: int = 64,
) -> list[tuple[int, int]]:
    """Trains on the CPU and on the device, and compares losses, parameters and buffers. Returns the
    compiled programs with an optimizer in them, and the executions, of each step."""
    ours = copy.deepcopy(model).to(DEVICE)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, ours)]
    compiled = torch.compile(loss, backend=backend, dynamic=True)
    steps = []
    with refusals() as refused:
        for size in sizes:
            args = make(*size)
            copies = bounded(args, dims, 4, most)
            for optimizer in optimizers:
                optimizer.zero_grad()
            expected = loss(model, *args)
            expected.backward()
            optimizers[0].step()
            with programs() as p, counted() as n:
                result = compiled(ours, *copies)
                result.backward()
                optimizers[1].step()
                lazyxla.sync()
            steps.append((len(p.large(4)), n.executions))
            torch.testing.assert_close(result.detach().cpu(), expected.detach())
            for mine, theirs in zip(ours.state_dict().values(), model.state_dict().values()):
                torch.testing.assert_close(mine.cpu(), theirs)
    assert refused == []
    return steps


def _mlp(width: int = 16) -> nn.Module:
    """A test that counts what is compiled has a width of its own."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 5))


def test_buckets_halve_the_upper_bound() -> None:
    assert halvings(64, 2) == (2, 4, 8, 16, 32, 64)
    assert halvings(100, 10) == (13, 25, 50, 100)
    assert halvings(7, 7) == (7,)


def test_inference_makes_one_graph_per_bucket() -> None:
    reference = _mlp()
    model = copy.deepcopy(reference).to(DEVICE)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    made: list[int] = []
    with torch.no_grad(), refusals() as refused:
        for rows in (5, 9, 33, 17, 20, 3, 7, 64, 40, 2, 11, 50, 13, 31, 6, 63, 24, 10, 48, 4):
            x = torch.randn(rows, 8)
            (ours,) = bounded((x,), [(0, 0)])
            with graphs_made(made):
                result = compiled(ours)
            assert result.shape == (rows, 5)
            assert result.is_contiguous()
            torch.testing.assert_close(result.cpu(), reference(x))
    assert refused == []
    assert sum(made) == 6
    assert made[9:] == [1] + [0] * 10  # the bucket of 2, and nothing any more


def test_a_size_of_a_known_bucket_compiles_small_programs_only() -> None:
    model = _mlp(17).to(DEVICE)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for rows in (60, 61, 60):
            (x,) = bounded((torch.randn(rows, 8),), [(0, 0)])
            with counted() as n:
                result = compiled(x)
                lazyxla.sync()
            assert result.shape == (rows, 5)
            if rows == 61:
                assert (n.compiles, n.nodes_lowered) == (2, 2)  # one pads, one cuts
    assert (n.compiles, n.executions) == (0, 3)


def test_the_size_of_a_bucket_is_not_padded() -> None:
    model = _mlp(18).to(DEVICE)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    (x,) = bounded((torch.randn(64, 8),), [(0, 0)])
    with torch.no_grad(), counted() as n:
        compiled(x)
        lazyxla.sync()
    assert (n.compiles, n.executions) == (1, 1)


def test_training_compiles_one_step_per_bucket(caplog: pytest.LogCaptureFixture) -> None:
    def loss(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(net(x), y)

    def make(rows: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(rows, 8), torch.randint(0, 5, (rows,))

    rows = (9, 33, 17, 20, 5, 7, 64, 40, 11, 50, 13, 31, 6, 63, 24, 10, 48, 4, 12, 60)
    steps = train(_mlp(20), loss, make, [(0, 0)], [(n,) for n in rows])
    assert sum(large for large, _ in steps) == 5  # for 4, 8, 16, 32 and 64
    assert all(executions <= 2 for _, executions in steps)  # the padding, and the step
    assert "has caused" not in caplog.text  # buckets are few: nothing to warn of


def test_eager_mode() -> None:
    reference = _mlp()
    model = copy.deepcopy(reference).to(DEVICE)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for mode in (True, "fused"):
        with lazyxla.eager_mode(mode):
            for rows in (5, 6):
                x = torch.randn(rows, 8)
                (ours,) = bounded((x,), [(0, 0)])
                torch.testing.assert_close(compiled(ours).detach().cpu(), reference(x).detach())


def test_a_region_stays_one_program() -> None:
    model = _mlp().to(DEVICE)
    compiled = torch.compile(lambda x: model(x).square().mean(), backend=backend, dynamic=True)
    step = lazyxla.compile(compiled, full_graph=True)
    for rows in (5, 6):
        x = torch.randn(rows, 8)
        (ours,) = bounded((x,), [(0, 0)])
        with counted() as n:
            result = step(ours)
        assert n.executions == 1
        torch.testing.assert_close(result.cpu(), model(x.to(DEVICE)).square().mean().cpu())


def test_without_bounds_sizes_are_exact() -> None:
    reference = _mlp(19)
    model = copy.deepcopy(reference).to(DEVICE)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad(), refusals() as refused:
        for rows in (5, 6, 7):
            x = torch.randn(rows, 8)
            ours = x.to(DEVICE)
            with counted() as n:
                result = compiled(ours)
                lazyxla.sync()
            assert (n.compiles, n.executions) == (1, 1)
            torch.testing.assert_close(result.cpu(), reference(x))
    assert refused == []


def test_bounds_beside_a_size_without() -> None:
    compiled = torch.compile(lambda x, y: x.mean(0) + y.sum(0), backend=backend, dynamic=True)
    made: list[int] = []
    for rows, others in ((5, 3), (6, 3), (7, 9), (8, 9)):
        x, y = torch.randn(rows, 4), torch.randn(others, 4)
        ours = bounded((x, y), [(0, 0)])
        with graphs_made(made):
            result = compiled(*ours)
        torch.testing.assert_close(result.cpu(), x.mean(0) + y.sum(0))
    assert made == [1, 0, 1, 0]  # for each of the others


@pytest.mark.parametrize("trains", [False, True])
def test_an_operator_without_a_rule_has_exact_sizes(trains: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin().roll(1, 0).cumsum(0)

    compiled = torch.compile(function, backend=backend, dynamic=True)
    with refusals() as refused:
        for rows in (5, 6, 7):
            x = torch.randn(rows, 3, requires_grad=trains)
            (ours,) = bounded((x,), [(0, 0)])
            result, expected = compiled(ours), function(x)
            torch.testing.assert_close(result.detach().cpu(), expected.detach())
            if trains:
                result.sum().backward()
                expected.sum().backward()
                torch.testing.assert_close(ours.grad.cpu(), x.grad)
    (text,) = refused
    assert "test_dynamo_padding.py" in text
    assert "aten.roll.default has no rule for padded dimensions" in text


def test_results_that_share_memory_and_arguments_that_are_written_have_exact_sizes() -> None:
    def share(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return y, y.view(-1)

    def write(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1).sum()

    with refusals() as refused:
        for rows in (5, 6):
            x = torch.randn(rows, 4)
            (ours,) = bounded((x,), [(0, 0)])
            y, flat = torch.compile(share, backend=backend, dynamic=True)(ours)
            flat.zero_()
            assert y.cpu().count_nonzero() == 0
            (ours,) = bounded((x,), [(0, 0)])
            torch.compile(write, backend=backend, dynamic=True)(ours)
            torch.testing.assert_close(ours.cpu(), x + 1)
    assert any("is a view of another result" in text for text in refused)
    assert any("writes into a tensor whose size varies" in text for text in refused)
