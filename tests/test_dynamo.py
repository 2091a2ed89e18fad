"""torch.compile(backend="lazyxla"): traced graphs become single nodes of the pending graph."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lazyxla
from lazyxla.dynamo import backend
from tests.support import DEVICE, counted, on_host, programs

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
    )


def _train(model: nn.Module, forward: nn.Module, steps: int) -> list[int]:
    """Trains; returns how many programs ran in each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    device = next(model.parameters()).device
    executions = []
    torch.manual_seed(1)
    for _ in range(steps):
        x, y = torch.randn(6, 1, 8, 8), torch.randint(0, 5, (6,))
        with counted() as n:
            optimizer.zero_grad()
            F.cross_entropy(forward(x.to(device)), y.to(device)).backward()
            optimizer.step()
            lazyxla.sync()
        executions.append(n.executions)
    return executions


def test_training_step_is_one_program_and_matches_the_cpu() -> None:
    reference = _net()
    model = copy.deepcopy(reference).to(DEVICE)
    _train(reference, reference, 4)
    lazyxla.reset_counters()
    momenta = len(list(model.parameters()))  # each begins as zeros, by a program of its own
    with programs() as compiled:
        steps = _train(model, torch.compile(model, backend=backend), 4)
    assert steps == [1 + momenta, 1, 1, 1]
    assert len(compiled.large(2)) == 1
    assert lazyxla.fallbacks() == {}
    for (name, ours), theirs in zip(
        model.state_dict().items(), reference.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(ours.cpu(), theirs, msg=lambda m, n=name: f"{n}: {m}")


def test_compiled_parts_are_not_recorded_again() -> None:
    model = _net().to(DEVICE).eval()
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(2, 1, 8, 8).to(DEVICE)
    with torch.no_grad():
        compiled(x)
        lazyxla.sync()
        with counted() as n:
            result = compiled(x)
    assert n.nodes_recorded == 1
    torch.testing.assert_close(result.cpu(), model.cpu()(x.cpu()))


def test_each_graph_is_one_execution_in_eager_mode() -> None:
    model = _net().to(DEVICE)
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(6, 1, 8, 8).to(DEVICE)
    compiled(x).sum().backward()
    lazyxla.sync()
    with lazyxla.eager_mode(True), torch.no_grad():
        model.eval()
        compiled(x)
        with counted() as n:
            compiled(x)
    assert n.executions == 1


def test_sizes_that_vary() -> None:
    model = nn.Linear(3, 2)
    compiled = torch.compile(copy.deepcopy(model).to(DEVICE), backend=backend)
    with torch.no_grad():
        for rows in (4, 7, 9, 4):
            x = torch.randn(rows, 3)
            torch.testing.assert_close(compiled(x.to(DEVICE)).cpu(), model(x))


def test_mutated_inputs_views_and_graph_breaks() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(1)
        z = x.t() @ y
        if z.sum() > 0:  # a graph break
            return z.relu(), x[0]
        return z, x[1]

    torch.manual_seed(0)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    ours = [x.to(DEVICE), y.to(DEVICE)]
    expected = function(x, y)
    results = torch.compile(function, backend=backend)(*ours)
    torch.testing.assert_close(ours[0].cpu(), x)
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result.cpu(), value)
    results[1].zero_()  # still a view of the argument
    row = 0 if expected[1].storage_offset() == 0 else 1
    assert ours[0][row].cpu().abs().max() == 0


def test_cache_written_in_place() -> None:
    def step(cache: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        cache[:, 1:3] = value
        return cache.sum(1)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    cache, value = torch.zeros(2, 5), torch.randn(2, 2)
    ours = cache.to(DEVICE)
    for _ in range(2):
        result = compiled(ours, value.to(DEVICE))
    torch.testing.assert_close(result.cpu(), step(cache, value))
    torch.testing.assert_close(ours.cpu(), cache)


def test_dropout_follows_the_seed() -> None:
    compiled = torch.compile(lambda x: F.dropout(x, 0.5), backend=backend)
    x = torch.ones(64, 64, device=DEVICE)
    torch.manual_seed(3)
    first, second = compiled(x).cpu(), compiled(x).cpu()
    torch.manual_seed(3)
    assert torch.equal(compiled(x).cpu(), first)
    assert not torch.equal(first, second)
    assert 0.4 < (first == 0).float().mean() < 0.6


def test_optimizer_step() -> None:
    reference = nn.Linear(4, 4)
    model = copy.deepcopy(reference).to(DEVICE)
    x = torch.randn(5, 4)
    for m in (reference, model):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        step = optimizer.step
        if m is model:
            step = torch.compile(optimizer.step, backend=backend)
        for _ in range(3):
            optimizer.zero_grad()
            m(x.to(m.weight.device)).square().sum().backward()
            step()
    torch.testing.assert_close(model.weight.detach().cpu(), reference.weight.detach())


def test_operator_of_the_host_falls_back() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return on_host(x) * 2

    x = torch.randn(4, 3)
    lazyxla.reset_counters()
    result = torch.compile(function, backend=backend)(x.to(DEVICE))
    torch.testing.assert_close(result.cpu(), function(x))
    assert sum(lazyxla.fallbacks().values()) == 1


def test_backend_is_found_by_name() -> None:
    from importlib.metadata import entry_points

    if not entry_points(group="torch_dynamo_backends", name="lazyxla"):
        pytest.skip("lazyxla is imported from its source, not installed")
    x = torch.randn(3)
    result = torch.compile(lambda t: t.sin() + 1, backend="lazyxla")(x.to(DEVICE))
    torch.testing.assert_close(result.cpu(), x.sin() + 1)
