"""Loops without a sync: their rounds are one program that runs many times."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

import lazyxla
from tests.support import DEVICE, counted, programs


@pytest.fixture
def max_pending() -> Iterator[Callable[[int], None]]:
    def set_to(nodes: int) -> None:
        lazyxla.settings.max_pending_nodes = nodes

    before = lazyxla.settings.max_pending_nodes
    yield set_to
    lazyxla.settings.max_pending_nodes = before


def network(width: int, layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(
            torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh())
            for _ in range(layers)
        )
    ).double()


def denoise(model: torch.nn.Module, device: str, rounds: int) -> torch.Tensor:
    """Rounds with numbers of their own, as a sampler of a diffusion model has."""
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(2, 16).to(device)
    with torch.no_grad():
        for i in range(rounds):
            x = x * (1 - 0.5 / (i + 2)) + model(x + 0.01 * i) / (i + 1)
    return x.cpu()


@pytest.mark.parametrize("rounds", [40, 57, 100])
def test_a_loop_compiles_its_rounds_once(rounds: int) -> None:
    layers, width = 20, 16
    model = network(width, layers)
    want = denoise(model, "cpu", rounds)
    model.to(DEVICE)
    with counted() as n:
        found = denoise(model, DEVICE, rounds)
    torch.testing.assert_close(found, want)
    assert n.graphs_cut == 1
    assert n.compiles <= 2  # numbers that differ between rounds are inputs at once
    assert n.executions > rounds / 4
    assert n.nodes_lowered < n.nodes_recorded / 4
    with counted() as n:
        torch.testing.assert_close(denoise(model, DEVICE, rounds), want)
    assert n.compiles == 0


def train(device: str, kind: type[torch.optim.Optimizer], steps: int) -> list[torch.Tensor]:
    model = network(8, 12).to(device)
    optimizer = kind(model.parameters(), 1e-2)
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(4, 8).to(device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [torch.stack(losses).cpu(), *(p.detach().cpu() for p in model.parameters())]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_training_without_a_sync(kind: type[torch.optim.Optimizer]) -> None:
    want = train("cpu", kind, 40)
    with counted() as n:
        found = train(DEVICE, kind, 40)
    for mine, other in zip(found, want, strict=True):
        torch.testing.assert_close(mine, other)
    assert n.nodes_lowered < n.nodes_recorded / 4
    assert n.compiles <= 6


def test_a_batch_of_its_own_in_each_round() -> None:
    def run(device: str) -> torch.Tensor:
        model = network(8, 30).to(device)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for i in range(40):
            x = torch.full((4, 8), i / 40, dtype=torch.float64).to(device)
            with torch.no_grad():
                total += model(x).sum()
        return total.cpu()

    want = run("cpu")
    with counted() as n:
        found = run(DEVICE)
    torch.testing.assert_close(found, want)
    assert n.graphs_cut == 1
    assert n.nodes_lowered < n.nodes_recorded / 4


def test_layers_are_no_rounds() -> None:
    """A deep model stays one program: its layers have weights of their own."""
    model = network(4, 600).to(DEVICE)
    x = torch.ones(2, 4, dtype=torch.float64, device=DEVICE)
    lazyxla.sync()
    with torch.no_grad(), counted() as n:
        y = model(x)
        lazyxla.sync()
    assert (n.graphs_cut, n.executions, n.compiles) == (0, 1, 1)
    assert y.shape == (2, 4)


def test_random_numbers_are_those_of_single_rounds() -> None:
    def run(sync: bool) -> list[torch.Tensor]:
        torch.manual_seed(5)
        x = torch.ones(4, 8, device=DEVICE)
        for _ in range(60):
            for _ in range(12):
                x = F.dropout(torch.sin(x * 1.5), 0.25) + 0.01 * torch.randn_like(x)
            if sync:
                lazyxla.sync()
        return [x.cpu(), torch.rand(3, device=DEVICE).cpu()]

    with counted() as n:
        found = run(sync=False)
    assert n.graphs_cut == 1
    for mine, other in zip(found, run(sync=True), strict=True):
        torch.testing.assert_close(mine, other)


def test_programs_that_end_anywhere_in_a_round(max_pending: Callable[[int], None]) -> None:
    """The limit of what is pending ends a graph in the middle of a round, each time in another."""
    model = network(8, 20).to(DEVICE)
    max_pending(1500)
    x = torch.ones(2, 8, dtype=torch.float64, device=DEVICE)
    with torch.no_grad():
        with programs() as found:
            for _ in range(12 * 60):
                x = model(x) * 0.5 + 0.1
        want = torch.ones(2, 8, dtype=torch.float64)
        plain = network(8, 20)
        for _ in range(12 * 60):
            want = plain(want) * 0.5 + 0.1
    torch.testing.assert_close(x.cpu(), want)
    assert len(found.cuts) > 15
    assert len(found.large(168)) <= 3, found.sizes


class Body:
    """A random round: computations, in-place writes and views of a few tensors."""

    def __init__(self, seed: int) -> None:
        pick = random.Random(seed)
        self.lines = [
            (pick.randrange(8), pick.randrange(4), pick.randrange(4))
            for _ in range(pick.randrange(10, 40))
        ]

    def run(self, device: str, rounds: int) -> list[torch.Tensor]:
        t = [
            torch.linspace(-1, 1 + i, 32, dtype=torch.float64).reshape(8, 4).to(device)
            for i in range(4)
        ]
        weight = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4).to(device)
        for i in range(rounds):
            for kind, a, b in self.lines:
                if kind == 0:
                    t[a] = torch.tanh(t[a] + t[b] * (i % 7))
                elif kind == 1:
                    t[a].mul_(0.5).add_(0.1)
                elif kind == 2:
                    t[a][1:3].add_(t[b][3:5].clone()).clamp_(-1, 1)
                elif kind == 3:
                    t[a] = torch.tanh(t[a] @ weight)
                elif kind == 4:
                    t[a].copy_(t[b])
                elif kind == 5:
                    t[a] = torch.softmax(t[a], 1)
                elif kind == 6:
                    t[a][:, i % 4] = t[b].mean(1)
                else:
                    t[a] = t[a] * 0.5 + t[b].flip(0).cos()
        return [x.cpu() for x in t]


@pytest.mark.parametrize("seed", range(8))
def test_random_rounds(seed: int) -> None:
    body = Body(seed)
    rounds = 1500 // len(body.lines)
    want = body.run("cpu", rounds)
    with counted() as n:
        found = body.run(DEVICE, rounds)
    for mine, other in zip(found, want, strict=True):
        torch.testing.assert_close(mine, other)
    assert n.compiles < 20
