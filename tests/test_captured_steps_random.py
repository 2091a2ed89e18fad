"""Captured steps follow whatever changes in what their code reads: random steps, random changes.

``pytest tests/test_captured_steps_random.py --steps 2000`` tries more of them than the default.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lazyxla
from tests import step_places
from tests.step_changes import CHANGES
from tests.step_places import PLACES, UNWATCHED, Place
from tests.step_twins import Twins
from tests.support import DEVICE, counted

VALUES = [0.25, 0.5, 0.75, 1.0, 1.0]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "number" in metafunc.fixturenames:
        one_in = 5 if metafunc.function is test_random_trainings else 1  # they compile much
        metafunc.parametrize("number", range(metafunc.config.getoption("--steps") // one_in))


@pytest.fixture(autouse=True)
def places_stay_as_they_are() -> Iterator[None]:
    yield
    step_places.reset()


class Pair:
    """A step twice, captured and plain, which read the same places."""

    def __init__(self, places: list[Place]) -> None:
        layer = nn.Linear(4, 4)
        self.places = places
        self.models = [copy.deepcopy(layer).to(DEVICE) for _ in range(2)]
        self.steps = [self._step(model) for model in self.models]
        self.steps[0] = lazyxla.compile(self.steps[0], capture=True)
        self.calls = 0

    def _step(self, model: nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        reads = [place.read for place in self.places]

        def step(x: torch.Tensor) -> torch.Tensor:
            y = model(x)
            for read in reads:
                y = read(y)
            loss = y.mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    def call(self) -> int:
        """Calls both and compares; returns whether the captured one ran its program."""
        self.calls += 1
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(self.calls)).to(DEVICE)
        lazyxla.sync()
        with counted() as n:
            result = self.steps[0](x)
        expected = self.steps[1](x)
        lazyxla.sync()
        torch.testing.assert_close(result.cpu(), expected.cpu())
        for a, b in zip(self.models[0].parameters(), self.models[1].parameters()):
            torch.testing.assert_close(a.detach().cpu(), b.detach().cpu())
        return n.captured_steps


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Place] = []

    def make(names: list[str]) -> list[Place]:
        made.extend(PLACES[name]() for name in names)
        return made

    yield make
    for place in made:
        place.undo()


@pytest.mark.parametrize("name", PLACES)
def test_each_change_of_each_place(name: str, make: Any) -> None:
    """By itself: the step is captured unless nothing can watch the place, and follows changes."""
    pair = Pair(make([name]))
    captured = sum(pair.call() for _ in range(5))
    assert captured or name in UNWATCHED
    for _ in range(2):
        for change in pair.places[0].changes:
            for value in (0.5, 0.25):
                change(value)
                pair.call()
                pair.call()
    if captured:
        assert sum(pair.call() for _ in range(6)) > 0, "it settles again"


def test_random_places(number: int, make: Any) -> None:
    rng = random.Random(number)
    names = rng.sample(sorted(set(PLACES) - UNWATCHED), rng.randint(2, 4))
    pair = Pair(make(names))
    history: list[str] = []
    try:
        for _ in range(12):
            for _ in range(rng.choice([0, 0, 0, 1, 2])):
                which = rng.randrange(len(names))
                change = rng.randrange(len(pair.places[which].changes))
                value = rng.choice(VALUES)
                history.append(f"change {change} of {names[which]}: {value}")
                pair.places[which].changes[change](value)
            history.append("call: captured" if pair.call() else "call")
    except BaseException as error:
        error.add_note("\n".join(["places: " + ", ".join(names), *history]))
        raise


class Optimizers:
    """What random trainings use."""

    kinds: dict[str, Any] = {  # noqa: RUF012
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    }


def make_random_step(clears: str) -> Any:
    def make(training: Any) -> Any:
        model, optimizer = training.model, training.optimizer

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if clears == "before":
                optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            if loss.requires_grad:
                loss.backward()
            if clears != "never":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if clears == "zeros":
                optimizer.zero_grad(set_to_none=False)
            elif clears == "after":
                optimizer.zero_grad()
            return loss.detach()

        return step

    return make


def test_random_trainings(number: int) -> None:
    rng = random.Random(number)
    kind, clears = rng.choice(sorted(Optimizers.kinds)), rng.choice(["before", "after", "zeros"])
    twins = Twins(
        make_random_step(clears),
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)),
        optimizer=Optimizers.kinds[kind],
    )
    history = [f"{kind}, gradients are cleared: {clears}"]
    chosen = rng.sample(CHANGES, 4)
    try:
        for _ in range(14):
            around = contextlib.ExitStack()
            for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
                change = rng.choice(chosen)
                history.append(change.__name__)
                if (context := change(twins, rng)) is not None:
                    around.enter_context(context)
            with around:
                history.append(f"call: {twins.run(1)}")
    except BaseException as error:
        error.add_note("\n".join(history))
        raise
