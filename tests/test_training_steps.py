"""Loops that train for several steps before they sync, with steps that differ: each kind of step is
compiled once, not each combination of them."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyxla
from lazyxla.planning.history import History
from lazyxla.planning.outline import Operator, Outline
from lazyxla.planning.training_steps import find_training_steps
from tests.support import DEVICE, assert_same, counted

EVERY = 5
"""Steps from one sync to the next."""
SETTLED = 7
"""Windows of so many steps, after which all kinds of steps were there: some graphs are cut from the
fifth window on, and one kind of step comes first in the seventh."""

Kind = Callable[[Any], torch.optim.Optimizer]
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def adam_by_parameter(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, weight_decay=0.1, foreach=False)


def network(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), *between, nn.Linear(12, 4)).double()


def batches(sizes: tuple[int, ...], count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(count):
        size = draw.choice(sizes)
        x = torch.randn(size, 8, generator=generator, dtype=torch.float64)
        yield x, torch.randint(0, 4, (size,), generator=generator)


def train(device: str, step: Step, sizes: tuple[int, ...], windows: int) -> list[int]:
    """How many programs each window compiles."""
    compiled = [lazyxla.counters()["compiles"]]
    losses = []
    for i, (x, y) in enumerate(batches(sizes, EVERY * windows)):
        losses.append(step(x.to(device), y.to(device)).detach())
        if i % EVERY == EVERY - 1:
            torch.stack(losses).mean().item()
            losses.clear()
            compiled.append(lazyxla.counters()["compiles"])
    return [after - before for before, after in itertools.pairwise(compiled)]


def plain(device: str, kind: Kind, model: nn.Module) -> Step:
    model.to(device)
    optimizer = kind(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model((x - 0.1) * 2), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step


def adversarial(device: str, kind: Kind, model: nn.Module) -> Step:
    """Two models that are updated in turn, each by what the other computes."""
    first, second = model.to(device), copy.deepcopy(model)
    optimizers = [kind(m.parameters()) for m in (first, second)]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for mine, other, optimizer in zip((first, second), (second, first), optimizers):
            loss = F.cross_entropy(mine(x) + other(x).detach(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss

    return step


def averaged(device: str, kind: Kind, model: nn.Module) -> Step:
    """With a teacher that is never updated, and an average of the parameters that is."""
    teacher = copy.deepcopy(model).to(device).requires_grad_(False)
    inner = plain(device, kind, model)
    average = [p.detach().clone() for p in model.parameters()]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = inner(x, y + 0 * teacher(x).argmax(1))
        with torch.no_grad():
            for mean, p in zip(average, model.parameters()):
                mean.lerp_(p, 0.1)
        return loss

    return step


@pytest.mark.parametrize("kind", [sgd, adam, adam_by_parameter])
@pytest.mark.parametrize("make", [plain, adversarial, averaged])
def test_each_kind_of_step_is_compiled_once(make: Any, kind: Kind) -> None:
    theirs, ours = network(), network()
    train("cpu", make("cpu", kind, theirs), (4, 6), SETTLED + 6)
    with counted() as n:
        compiled = train(DEVICE, make(DEVICE, kind, ours), (4, 6), SETTLED + 6)
    assert compiled[SETTLED:] == [0] * 6, compiled
    assert n.graphs_cut >= 6
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        assert_same(mine, other)


def test_steps_of_one_size() -> None:
    """The first window, in which the optimizer's first step is another one, and the second."""
    compiled = train(DEVICE, plain(DEVICE, sgd, network()), (4,), 6)
    assert compiled[2:] == [0] * 4


def test_random_numbers_are_those_of_single_steps() -> None:
    def parameters(sync: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = network(nn.Dropout(0.3))
        inner = plain(DEVICE, sgd, model)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = inner(x + torch.rand_like(x), y)
            if sync:
                lazyxla.sync()
            return loss

        torch.manual_seed(4)
        train(DEVICE, step, (4, 6), 6)
        return [p.detach().cpu() for p in model.parameters()]

    with counted() as n:
        found = parameters(sync=False)
    assert n.graphs_cut > 0
    for mine, other in zip(found, parameters(sync=True)):
        torch.testing.assert_close(mine, other)


def outline(*steps: str, updates: str = "u") -> Outline:
    """Steps of one parameter: "f" computes with it and a batch, "g" with what was computed last,
    "r" something random that the next operator takes, too, and "u" updates it."""
    operators: list[Operator] = []
    operands: list[list[int]] = []
    inputs = ["Double[2]"] * (1 + len(steps))
    parameter, last, drawn = 0, 0, []
    for number, step in enumerate(steps, 1):
        for kind in step:
            taken = {"f": [parameter, number], "g": [last], "r": [], "u": [parameter, last]}[kind]
            operators.append(Operator(kind, ord(kind), 1, 1, kind in updates, False))
            operands.append(taken + ([] if kind == "r" else drawn))
            last_made = len(inputs) + len(operators) - 1
            drawn = [last_made] if kind == "r" else []
            if kind == "u":
                parameter = last_made
            if kind != "r":
                last = last_made
    return Outline(
        inputs, operators, operands, [()] * len(operators), [parameter], [], [-1] * len(inputs)
    )


def test_a_step_ends_with_the_update() -> None:
    step = "f" + "g" * 18 + "u"
    assert find_training_steps(outline(step, step, step)) == [0] * 20 + [1] * 20 + [2] * 20


def test_random_numbers_belong_to_the_step_that_takes_them() -> None:
    step = "fg" + "rg" * 9 + "u"
    assert find_training_steps(outline(step, step, step)) == [0] * 21 + [1] * 21 + [2] * 21


@pytest.mark.parametrize(
    "steps",
    [
        ["f" + "g" * 40 + "u"] * 2 + ["f" + "g" * 40],  # which reads what the second one updates
        ["f" + "g" * 8 + "u"] * 4,
    ],
)
def test_what_is_not_several_steps_of_some_size(steps: list[str]) -> None:
    assert find_training_steps(outline(*steps)) == []
    assert find_training_steps(outline(*steps, updates="")) == []


def test_large_graphs_are_cut_at_once() -> None:
    large = outline(*["f" + "g" * length + "u" for length in (300, 350, 400)])
    plan = History().plan(large, True)
    assert plan.is_certain
    assert plan.stages == [0] * 302 + [1] * 352 + [2] * 402


def test_the_first_graphs_of_several_steps_stay_whole() -> None:
    """They may come again as they are."""
    history = History()
    stages = []
    for length in (30, 40, 50, 60):
        plan = history.plan(outline(*["f" + "g" * length + "u"] * 2, "f" + "g" * 30 + "u"), True)
        stages.append(bool(plan.stages) and plan.is_certain)
    assert stages == [False, False, True, True]
    assert plan.reason.endswith(", of several training steps")


class Whitening(torch.optim.Optimizer):
    """It multiplies gradients by a matrix that it updates several times in a step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                gradient, state = p.grad.reshape(len(p), -1), self.state[p]
                if not state:
                    state["matrix"] = torch.eye(len(p), dtype=p.dtype, device=p.device)
                for _ in range(3):
                    whitened = state["matrix"] @ gradient
                    state["matrix"].lerp_(whitened @ whitened.mT, 0.1)
                p.sub_((state["matrix"] @ gradient).view_as(p), alpha=group["lr"])


def test_a_step_in_which_an_optimizer_reads_what_it_has_updated_is_one_program() -> None:
    with counted() as n:
        for width in range(8, 13):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4)).double()
            step = plain(DEVICE, Whitening, model)
            for x, y in batches((4,), 2):
                step(x.to(DEVICE), y.to(DEVICE))
                lazyxla.sync()
    assert n.graphs_cut == 0


def test_several_steps_of_such_an_optimizer_are_cut_into_these() -> None:
    model = network()
    with counted() as n:
        compiled = train(DEVICE, plain(DEVICE, Whitening, model), (4, 6), SETTLED + 6)
    assert compiled[SETTLED:] == [0] * 6, compiled
    assert n.graphs_cut >= 6
    theirs = network()
    train("cpu", plain("cpu", Whitening, theirs), (4, 6), SETTLED + 6)
    for mine, other in zip(model.parameters(), theirs.parameters()):
        assert_same(mine, other)
