"""Tensors that are made on the device from no data run apart from what uses them: whether they were
made before a loop or in each step of it, the step is compiled once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import lazyxla
from lazyxla.planning.made import find_made
from lazyxla.planning.outline import Operator, Outline
from tests.support import DEVICE, counted

Data = tuple[torch.Tensor, torch.Tensor]

BATCH, INPUTS, CLASSES = 12, 10, 3
STEPS = 5


def drawn() -> Data:
    return (
        torch.randn(BATCH, INPUTS, device=DEVICE),
        torch.randint(CLASSES, (BATCH,), device=DEVICE),
    )


def labelled_by_rule() -> Data:
    x = torch.rand(BATCH, INPUTS, device=DEVICE) * 2 - 1
    return x, (x.sum(1) > 0).long()


def filled() -> Data:
    x = torch.empty(BATCH, INPUTS, device=DEVICE).normal_()
    x[:, 0] = 1
    return x, torch.zeros(BATCH, dtype=torch.long, device=DEVICE)


def counted_up() -> Data:
    x = torch.arange(BATCH * INPUTS, device=DEVICE).reshape(BATCH, INPUTS)
    return torch.sin(x), x[:, 0] % CLASSES


MAKERS = [drawn, labelled_by_rule, filled, counted_up]


class Step:
    """Of a network whose size no other test has, so that its program is not known from one."""

    sizes = iter(range(17, 1000))

    def __init__(self, size: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(INPUTS, size), nn.GELU(), nn.Dropout(0.2), nn.Linear(size, CLASSES)
        )
        self.model = model.to(DEVICE)
        self.optimizer = optim.AdamW(self.model.parameters(), 1e-2)

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@pytest.mark.parametrize("make", MAKERS)
def test_made_before_a_loop(make: Callable[[], Data]) -> None:
    def train(size: int, synced: bool) -> tuple[list[float], list[int]]:
        step = Step(size)
        data = make()
        if synced:
            lazyxla.sync()
        losses, compiles = [], []
        for _ in range(STEPS):
            losses.append(step(*data).item())
            compiles.append(lazyxla.counters()["compiles"])
        return losses, compiles

    size = next(Step.sizes)
    losses, compiles = train(size, synced=False)
    assert compiles[1:] == compiles[:1] * (STEPS - 1)
    expected, again = train(size, synced=True)
    assert losses == expected
    assert again[-1] - compiles[-1] <= 1  # that of the data alone, if any


@pytest.mark.parametrize("make", MAKERS)
def test_made_in_each_step(make: Callable[[], Data]) -> None:
    step = Step(next(Step.sizes))
    data = make()  # alive when the graph runs, as a script's variables are
    step(*data).item()
    with counted() as n:
        for _ in range(70):  # longer than a graph that was cut on trial runs in parts
            data = make()
            step(*data).item()
    assert n.compiles == n.fallbacks == 0
    assert n.executions == 2 * 70


class Sum:
    def __init__(self) -> None:
        self.kept = torch.zeros((), device=DEVICE)

    def add(self, loss: torch.Tensor, x: torch.Tensor) -> None:
        self.kept += loss


class Queue:
    def __init__(self) -> None:
        self.kept = F.normalize(torch.randn(4 * BATCH, INPUTS, device=DEVICE), dim=1)
        self.next = 0

    def add(self, loss: torch.Tensor, x: torch.Tensor) -> None:
        self.kept[self.next : self.next + BATCH] = x
        self.next = (self.next + BATCH) % len(self.kept)


class Extremes:
    def __init__(self) -> None:
        self.kept = torch.empty(2, INPUTS, device=DEVICE)
        self.kept[0].fill_(torch.inf)
        self.kept[1] = -torch.inf

    def add(self, loss: torch.Tensor, x: torch.Tensor) -> None:
        self.kept[0].copy_(torch.minimum(self.kept[0], x.amin(0)))
        self.kept[1].copy_(torch.maximum(self.kept[1], x.amax(0)))


class Averages:
    """Whose weights are of no data, however often they are written to."""

    def __init__(self) -> None:
        self.kept = torch.zeros(INPUTS, device=DEVICE)
        self.weights = torch.ones(INPUTS, device=DEVICE)

    def add(self, loss: torch.Tensor, x: torch.Tensor) -> None:
        self.weights.mul_(0.9)
        self.kept.mul_(1 - self.weights).add_(x.mean(0) * self.weights)


@pytest.mark.parametrize("kind", [Sum, Queue, Extremes, Averages])
def test_what_each_step_writes_to(kind: type[Any]) -> None:
    def train(synced: bool) -> tuple[torch.Tensor, list[int]]:
        step = Step(size)
        state = kind()
        if synced:
            lazyxla.sync()
        compiles = []
        for i in range(STEPS):
            x = (torch.arange(BATCH * INPUTS).reshape(BATCH, INPUTS).float() * (i + 1)).sin()
            x, y = x.to(DEVICE), (torch.arange(BATCH) % CLASSES).to(DEVICE)
            state.add(step(x, y), x)
            lazyxla.sync()
            compiles.append(lazyxla.counters()["compiles"])
        return state.kept.cpu(), compiles

    size = next(Step.sizes)
    kept, compiles = train(synced=False)
    # The second position of a queue makes positions inputs.
    assert compiles[2:] == compiles[1:2] * (STEPS - 2)
    assert compiles[1] - compiles[0] <= (kind is Queue)
    expected, _ = train(synced=True)
    assert torch.equal(kept, expected)


def test_beside_a_step_that_is_alike() -> None:
    """Which the first step's graph differs from in little; not all of it is there, though."""
    size = next(Step.sizes)
    x, y = (each.to(DEVICE) for each in (torch.ones(BATCH, INPUTS), torch.arange(BATCH) % CLASSES))
    step = Step(size)
    for _ in range(2):
        step(x, y).item()
    step, total, compiles = Step(size), torch.zeros((), device=DEVICE), []
    for _ in range(STEPS):
        total += step(x, y)
        lazyxla.sync()
        compiles.append(lazyxla.counters()["compiles"])
    assert compiles[1:] == compiles[:1] * (STEPS - 1)


def test_gradients_that_begin_as_zeros_are_part_of_the_step() -> None:
    """As that of a table in which a step looks up some rows."""
    table = nn.Parameter(torch.ones(9, INPUTS).to(DEVICE))
    model = nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()).to(DEVICE)
    rows = torch.tensor([1, 4, 4]).to(DEVICE)

    def step() -> torch.Tensor:
        for parameter in [table, *model.parameters()]:
            parameter.grad = None
        loss = (model(table[rows]) + model(table[2:5])).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        with counted() as n:
            loss = step()
            lazyxla.sync()
        assert loss.isfinite()
    assert n.executions == 1


def test_what_nothing_keeps_is_part_of_the_step() -> None:
    step = Step(next(Step.sizes))

    def whole() -> torch.Tensor:
        return step(*drawn())

    whole().item()
    with counted() as n:
        whole().item()
    assert n.executions == 1
    assert n.compiles == 0


def test_what_is_written_anew_is_part_of_the_step() -> None:
    """A tensor that had other content before is no data that was made before the loop."""
    step = Step(next(Step.sizes))
    x, y = (each.to(DEVICE) for each in (torch.ones(BATCH, INPUTS), torch.arange(BATCH) % CLASSES))
    total = torch.ones(4).to(DEVICE)
    for _ in range(2):
        with counted() as n:
            total.zero_()
            step(x, y).item()
    assert n.executions == 1
    assert total.tolist() == [0] * 4


@pytest.mark.parametrize("seed", range(40))
def test_stages_of_random_graphs(seed: int) -> None:
    pick = random.Random(seed)
    inputs, length = pick.randrange(3), pick.randrange(10, 100)
    operators = [
        Operator("op", 0, pick.randrange(1, 3), pick.randrange(1, 3), False, False)
        for _ in range(length)
    ]
    operands: list[list[int]] = []
    made = inputs
    for operator in operators:
        operands.append([pick.randrange(made) for _ in range(pick.randrange(3)) if made])
        made += operator.results
    chosen = [pick.randrange(inputs, made) for _ in range(pick.randrange(4))]

    def is_of_data(value: int) -> bool:
        maker = graph.makers()[value]
        return maker < 0 or any(is_of_data(operand) for operand in operands[maker])

    graph = Outline(["a"] * inputs, operators, operands, [[]] * length, [], [], [-1] * inputs)
    graph.made = [value for value in chosen if not is_of_data(value)]
    expected = {graph.makers()[value] for value in graph.made}
    for i in reversed(range(length)):
        if i in expected:
            expected.update(graph.sources[i])
    rest = sum(operators[i].size for i in range(length) if i not in expected)
    if expected and rest >= 16:
        assert find_made(graph) == [int(i not in expected) for i in range(length)]
    else:
        assert find_made(graph) == []
