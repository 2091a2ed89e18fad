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
    "SGD, momentum": lambda p: optim.SGD(p, lr=0.05, momentum=0.9),
    "SGD, momentum, one by one": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, foreach=False),
    "SGD, momentum, fused": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "SGD, Nesterov": lambda p: optim.SGD(
        p, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.01, maximize=True
    ),
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


def train_complex(make: Make, device: str, after: Callable[[int], Any]) -> torch.Tensor:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 5, dtype=torch.complex64).to(device))
    inputs = torch.randn(3, 4, dtype=torch.complex64).to(device)
    lazyxla.sync()
    optimizer = make([weight])
    for i in range(7):
        optimizer.zero_grad()
        (inputs @ weight).abs().square().mean().backward()
        optimizer.step()
        after(i)
    return weight.detach()


# Fused ones and Adafactor do not take complex parameters.
@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if not n.endswith(("fused", "factor"))])
def test_a_step_of_complex_parameters_is_compiled_once(name: str) -> None:
    """Optimizers write them as real numbers; they are complex inputs in each step nevertheless."""
    compiles: list[int] = []
    found = train_complex(OPTIMIZERS[name], DEVICE, noting("compiles", compiles))
    assert compiles[1:] == [compiles[0]] * 6
    on_cpu = OPTIMIZERS[name.removesuffix(", capturable")]
    expected = train_complex(on_cpu, "cpu", lambda step: None)
    torch.testing.assert_close(found.cpu(), expected)


def test_a_first_step_that_computes_something_else_has_a_program_of_its_own() -> None:
    compiles: list[int] = []
    damped: Make = lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5)  # noqa: E731
    train(damped, DEVICE, 6, False, noting("compiles", compiles))
    assert compiles[1] == compiles[0] + 1
    assert compiles[2:] == [compiles[1]] * 4


def test_momentum_begins_with_the_first_gradient() -> None:
    """Of a parameter that has none at first, too; one that never has any gets no state."""
    momenta = []
    for device in (DEVICE, "cpu"):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(3).to(device)) for _ in range(3)]
        optimizer = optim.SGD(parameters, lr=0.1, momentum=0.9)
        for used in (1, 1, 2, 2):
            optimizer.zero_grad()
            sum(p.square().sum() for p in parameters[:used]).backward()
            optimizer.step()
        states = [optimizer.state.get(p, {}).get("momentum_buffer") for p in parameters]
        assert states[2] is None
        momenta.append([state.cpu() for state in states[:2]])
    torch.testing.assert_close(*momenta)


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


def model_with_mask(device: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """A model, and its loss, whose forward makes a tensor and multiplies by a number."""
    torch.manual_seed(0)
    model, x = nn.Linear(6, 5).to(device), torch.randn(4, 6).to(device)

    def loss() -> torch.Tensor:
        mask = torch.ones(4, 5, device=device).triu()
        return (model(x * 0.75) * mask).square().mean()

    return model, loss


def closure_of(
    optimizer: optim.Optimizer, loss: Callable[[], torch.Tensor]
) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    return closure


def test_a_closure_makes_the_gradients_that_momentum_begins_with() -> None:
    momentum: Make = lambda p: optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
    model, loss = model_with_mask(DEVICE)
    optimizer = momentum(model.parameters())
    closure = closure_of(optimizer, loss)
    optimizer.step(closure)
    lazyxla.sync()
    with counted() as n:
        optimizer.step(closure)
        lazyxla.sync()
    assert n.compiles == 0
    assert n.executions == 1


@pytest.mark.parametrize("make", [optim.AdamW, lambda p: optim.SGD(p, lr=0.1, momentum=0.9)])
def test_a_closure_records_what_it_does_elsewhere(make: Make) -> None:
    """Its forward is no part of what the optimizer makes and scales: the same programs."""
    model, loss = model_with_mask(DEVICE)
    optimizer = make(model.parameters())
    closure = closure_of(optimizer, loss)

    def plain() -> None:
        closure()
        optimizer.step()

    for number in range(8):
        with counted() as n:
            if number < 4:
                plain()
            elif number % 2:
                optimizer.step(closure)
            else:
                optimizer.step(closure=closure)
            lazyxla.sync()
        if number > 1:
            assert n.executions == 1
            assert n.compiles == 0


def test_a_closure_is_marked_as_itself() -> None:
    weight = nn.Parameter(torch.ones(3, device=DEVICE))

    def closure() -> float:
        """Returns what it is."""
        return 7.0

    seen = []

    class Careful(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(closure.__doc__)
            return super().step(closure)

    assert Careful([weight], lr=0.1).step(closure) == 7.0
    assert seen == ["Returns what it is."]


class Bounded(optim.Optimizer):
    """In each step it makes tensors that it does not keep, one of them from a number."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["count"], state["mean"] = 0, torch.zeros_like(p)
                state["count"] += 1
                state["mean"].lerp_(p.grad, 0.1)
                size = torch.full_like(p, group["lr"] / (1 - 0.9 ** state["count"]))
                scale = torch.where(p.grad > 0, torch.ones_like(p), 0.5)
                p.sub_(size.div_(2).mul_(state["mean"]).mul_(scale))


def test_what_an_optimizer_makes_in_each_step_is_no_state() -> None:
    compiles: list[int] = []
    executions: list[int] = []

    def after(step: int) -> None:
        noting("compiles", compiles)(step)
        executions.append(lazyxla.counters()["executions"])

    found = train(Bounded, DEVICE, 8, False, after)
    assert [b - a for a, b in pairwise(executions)] == [1] * 7
    assert compiles[2:] == [compiles[1]] * 6
    expected = train(Bounded, "cpu", 8, False, lambda step: None)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))


def test_state_is_made_apart_again_after_it_was_temporary() -> None:
    """Whether such a tensor is state may be known from the last step of an optimizer only."""
    train(Bounded, DEVICE, 3, False, noting("compiles", []))
    for _ in range(3):
        compiles: list[int] = []
        train(optim.Adam, DEVICE, 5, False, noting("compiles", compiles))
    assert compiles == [compiles[0]] * 5
