"""A training step is compiled once: the optimizer's state and its numbers are inputs from the
first step on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn, optim

import lazyxla
from tests.support import DEVICE, counted

Make = Callable[[Iterable[nn.Parameter]], optim.Optimizer]

# Those whose every step computes the same.
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, lr=0.05, weight_decay=0.01),
    "Adam": optim.Adam,
    "Adam, one by one": lambda p: optim.Adam(p, foreach=False),
    "Adam, fused": lambda p: optim.Adam(p, fused=True),
    "Adam, capturable": lambda p: optim.Adam(p, capturable=True),
    "AdamW": optim.AdamW,
    "AdamW, amsgrad": lambda p: optim.AdamW(p, amsgrad=True),
    "Adagrad": optim.Adagrad,
    "Adamax": optim.Adamax,
    "Adadelta": optim.Adadelta,
    "NAdam": optim.NAdam,
    "RMSprop": optim.RMSprop,
    "RMSprop, centered": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": optim.Rprop,
    "Adafactor": optim.Adafactor,
}


def warm_up(step: int) -> float:
    return min(1.0, step / 4)


def train(
    make: Make, device: str, steps: int, schedule: bool, after: Callable[[int], Any]
) -> list[float]:
    """The losses of a small model; `after` is called after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    inputs, targets = torch.randn(5, 6), torch.randn(5, 3)
    model, inputs, targets = model.to(device), inputs.to(device), targets.to(device)
    lazyxla.sync()
    optimizer = make(model.parameters())
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, warm_up) if schedule else None
    losses = []
    for i in range(steps):
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        if scheduler:
            scheduler.step()
        losses.append(loss.detach())
        after(i)
    return [loss.item() for loss in losses]


def noting(counter: str, counts: list[int]) -> Callable[[int], None]:
    """Ends each step, and appends what has been counted by then."""

    def after(_: int) -> None:
        lazyxla.sync()
        counts.append(lazyxla.counters()[counter])

    return after


@pytest.mark.parametrize("schedule", [False, True], ids=["constant", "warm-up"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_compiled_once(name: str, schedule: bool) -> None:
    compiles: list[int] = []
    found = train(OPTIMIZERS[name], DEVICE, 7, schedule, noting("compiles", compiles))
    assert compiles[1:] == [compiles[0]] * 6
    # (On the CPU there is no capturable form, which computes the same.)
    on_cpu = OPTIMIZERS[name.removesuffix(", capturable")]
    expected = train(on_cpu, "cpu", 7, schedule, lambda step: None)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))


def test_a_first_step_that_computes_something_else_has_a_program_of_its_own() -> None:
    compiles: list[int] = []
    momentum: Make = lambda p: optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
    train(momentum, DEVICE, 6, False, noting("compiles", compiles))
    assert compiles[1] == compiles[0] + 1
    assert compiles[2:] == [compiles[1]] * 4


def test_a_region_has_one_program() -> None:
    """The optimizer's state is made before it."""
    model = nn.Linear(5, 3).to(DEVICE)
    optimizer = optim.AdamW(model.parameters())
    x = torch.ones(2, 5, device=DEVICE)

    @lazyxla.compile(full_graph=True, max_graphs=1)
    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    losses = [step().item() for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


def test_a_step_runs_as_one_program_once_there_is_state() -> None:
    executions: list[int] = []
    train(optim.Rprop, DEVICE, 4, False, noting("executions", executions))
    assert [b - a for a, b in pairwise(executions)] == [1, 1, 1]


def test_a_step_that_fails_is_over() -> None:
    weight = nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer = optim.SGD([weight], lr=0.1)

    def closure() -> float:
        raise ValueError("no loss today")

    with pytest.raises(ValueError, match="no loss today"):
        optimizer.step(closure)
    lazyxla.sync()
    with counted() as n:
        x = torch.zeros(4, device=DEVICE)
        x.add_(2.5)
        lazyxla.sync()
    assert n.executions == 1
    assert x.tolist() == [2.5] * 4
