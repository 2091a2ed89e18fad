"""torch.compile with sizes that vary: one node per call, one program per combination of sizes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lazyxla
from lazyxla.dynamo import MAX_SPECIALISATIONS, backend
from lazyxla.lowering import registry
from tests.support import DEVICE, check, counted

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 5))


@pytest.mark.parametrize("dynamic", [None, True])
def test_known_sizes_are_one_node_and_compile_nothing(dynamic: bool | None) -> None:
    reference = _net()
    model = copy.deepcopy(reference).to(DEVICE)
    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    lazyxla.reset_counters()
    with torch.no_grad():
        for rows in (4, 7, 9):
            x = torch.randn(rows, 1, 8, 8)
            torch.testing.assert_close(compiled(x.to(DEVICE)).cpu(), reference(x))
        for rows in (7, 9, 7):
            x = torch.randn(rows, 1, 8, 8)
            ours = x.to(DEVICE)
            with counted() as n:
                result = compiled(ours)
                lazyxla.sync()
            assert (n.nodes_recorded, n.compiles, n.executions) == (1, 0, 1)
            torch.testing.assert_close(result.cpu(), reference(x))
    assert lazyxla.fallbacks() == {}


def test_training_on_known_sizes_is_two_nodes_and_compiles_nothing() -> None:
    reference = _net()
    model = copy.deepcopy(reference).to(DEVICE)

    def loss_of(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(net(x), y)

    compiled = torch.compile(loss_of, backend=backend, dynamic=True)
    root = torch.ones(()).to(DEVICE)

    def step(rows: int) -> dict[str, int]:
        x, y = torch.randn(rows, 1, 8, 8), torch.randint(0, 5, (rows,))
        reference.zero_grad()
        loss_of(reference, x, y).backward()
        ours = x.to(DEVICE), y.to(DEVICE)
        model.zero_grad()
        with counted() as n:
            compiled(model, *ours).backward(root)
            lazyxla.sync()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.cpu(), theirs.grad)
        return n

    for rows in (3, 6):
        step(rows)
    for rows in (3, 6):
        n = step(rows)
        assert (n.nodes_recorded, n.compiles, n.executions) == (2, 0, 1)


def test_several_varying_sizes_and_numbers_computed_from_them() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
        rows, columns = x.shape
        both = torch.cat([x, y.t().reshape(columns, -1).t()[: rows + 1]])
        return both.reshape(-1, 2) * (rows / columns) + torch.arange(2, device=x.device), rows * 2

    compiled = torch.compile(function, backend=backend, dynamic=True, fullgraph=True)
    for rows, columns in ((2, 4), (3, 4), (2, 6), (3, 4)):
        x, y = torch.randn(rows, columns), torch.randn(rows + 2, columns)
        result, number = compiled(x.to(DEVICE), y.to(DEVICE))
        expected, theirs = function(x, y)
        torch.testing.assert_close(result.cpu(), expected)
        assert number == theirs


def test_a_number_that_varies_is_an_input_of_the_program() -> None:
    compiled = torch.compile(lambda x, s: x * s + 1, backend=backend)
    x = torch.randn(3)
    ours = x.to(DEVICE)
    # A constant, an input at its first value, an input that varies.
    for number in (0.5, 1.5, 2.5):
        compiled(ours, number).cpu()
    with counted() as n:
        result = compiled(ours, 4.5)
        lazyxla.sync()
    assert (n.nodes_recorded, n.compiles, n.executions) == (1, 0, 1)
    torch.testing.assert_close(result.cpu(), x * 4.5 + 1)


def test_cache_of_varying_length_is_written_in_place() -> None:
    def step(cache: torch.Tensor, value: torch.Tensor, length: int) -> torch.Tensor:
        cache[:, length - 1 : length] = value
        return cache[:, :length].sum(1)

    compiled = torch.compile(step, backend=backend, dynamic=True)
    cache = torch.zeros(2, 9)
    ours = cache.to(DEVICE)
    for length in range(2, 7):
        value = torch.randn(2, 1)
        result = compiled(ours, value.to(DEVICE), length)
        torch.testing.assert_close(result.cpu(), step(cache, value, length))
    torch.testing.assert_close(ours.cpu(), cache)


def test_specialisations_are_bounded() -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, backend=backend, dynamic=True)
    gc.collect()
    before = len(registry.graphs)
    for rows in range(2, MAX_SPECIALISATIONS + 12):
        compiled(torch.ones(rows, device=DEVICE))
        if rows % 16 == 0:
            lazyxla.sync()
    lazyxla.sync()
    assert len(registry.graphs) - before == MAX_SPECIALISATIONS
    x = torch.randn(2)
    torch.testing.assert_close(compiled(x.to(DEVICE)).cpu(), x.sin() + 1)  # made anew


def test_sizes_that_depend_on_data_are_recorded_operator_by_operator() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].cumsum(0) * 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        for _ in range(2):
            check(compiled, torch.randn(7))


Views = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]

VIEWS: dict[str, Views] = {
    "of an argument": lambda x: (x[x.shape[0] - 1], x.view(-1), x.view(-1, 2)[-1]),
    "of an argument that is written": lambda x: (x.add_(1).view(-1)[x.shape[0] :],),
    "of a result": lambda x: ((h := x.t().flatten().view(-1, x.shape[0]))[-1], h[0], h[:, 1:], h),
}


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_results_that_are_views_begin_where_they_should(
    name: str, bounded: bool, trains: bool
) -> None:
    compiled = torch.compile(VIEWS[name], backend=backend, dynamic=True)
    # PyTorch itself forgets where a written argument begins, in training.
    for start, rows in ((0, 4), (0 if trains and "written" in name else 3, 5)):
        found = []
        for function, device in ((VIEWS[name], "cpu"), (compiled, DEVICE)):
            whole = torch.arange(40.0).to(device).requires_grad_(trains)
            memory = whole * 1
            x = memory[start : start + rows * 6].view(rows, 6)
            if bounded and device == DEVICE:
                torch._dynamo.mark_dynamic(x, 0, min=3, max=8)
            results = function(x)
            gradients = ()
            if trains:
                gradients = torch.autograd.grad([y.square().sum() for y in results], whole)
            places = [(y.stride(), y.storage_offset()) for y in results]
            shared = [y.untyped_storage().data_ptr() == memory.data_ptr() for y in results]
            tensors = [y.detach().cpu() for y in (*results, memory, *gradients)]
            found.append((tensors, shared, places if shared[0] else None))
        torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=0)
        assert found[1][1:] == found[0][1:]


def test_results_that_are_views_of_another_dtype() -> None:
    def function(x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        last = x.shape[0] - 1
        return x.view(torch.int32)[last], torch.view_as_real(z)[last], z.imag[last], z[last]

    compiled = torch.compile(function, backend=backend, dynamic=True)
    for rows in (3, 4):
        args = torch.randn(rows, 2), torch.randn(rows, 2, dtype=torch.complex64)
        results = compiled(*(x.to(DEVICE) for x in args))
        torch.testing.assert_close([y.cpu() for y in results], [*function(*args)], rtol=0, atol=0)
