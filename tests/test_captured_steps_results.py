"""Captured steps: what they return, which ones there are none of, and threads and memory."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lazyxla
from tests.step_twins import Step, Training, Twins, adam, loss_of, plain_step, sgd
from tests.support import DEVICE, assert_same, counted

# --- Results -------------------------------------------------------------------------------------


def test_results_are_new_tensors_each_time() -> None:
    twins = Twins()
    twins.settle()
    kept = []
    for _ in range(3):
        x, y = (t.to(DEVICE) for t in twins.batch())
        loss = twins.captured.step(x, y)
        twins.other.step(x, y)
        kept.append((loss, loss.item()))
    assert len({loss.data_ptr() for loss, _ in kept}) == 3
    for loss, value in kept:
        assert loss.item() == value
    assert loss.requires_grad
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_containers_that_are_returned_are_the_same_as_without_capture() -> None:
    options, scales = {"scale": 1.0}, [1.0]

    def make(training: Training) -> Step:
        plain = plain_step(training)

        def step(x: torch.Tensor, y: torch.Tensor, *more: Any) -> Any:
            return (plain(x, y).detach(), options, scales, *more)

        return step

    twins = Twins(make)
    x, y = torch.randn(6, 8, device=DEVICE), torch.randn(6, 4, device=DEVICE)
    with counted() as n:
        for _ in range(6):
            made = twins.captured.step(x, y)
            assert made[1] is options
            assert made[2] is scales
    assert n.captured_steps > 0
    mine = [1.0]
    for _ in range(6):  # a list of the arguments: not captured
        assert twins.captured.step(x, y, mine)[3] is mine


def test_structured_results() -> None:
    def make(training: Training) -> Step:
        def step(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
            output = training.model(x)
            loss = F.mse_loss(output, y)
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            loss = loss.detach()
            weight = training.model[0].weight
            return {"loss": (loss, loss), "n": [3, None], "out": output.detach().t(), "w": weight}

        return step

    twins = Twins(make)
    twins.settle()
    x, y = (t.to(DEVICE) for t in twins.batch())
    result = twins.captured.step(x, y)
    assert result["loss"][0] is result["loss"][1]
    assert result["w"] is twins.captured.model[0].weight
    assert result["out"].stride() == (1, 4)
    twins.compare(result, twins.other.step(x, y))


@pytest.mark.parametrize("how", ["not yet", "retained"])
def test_a_result_with_gradients_to_come_is_not_captured(how: str, caplog) -> None:
    caplog.set_level(logging.INFO, "lazyxla")

    def make(training: Training) -> Step:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.mse_loss(training.model(x), y)
            if how == "retained":
                loss.backward(retain_graph=True)
                training.optimizer.zero_grad()
            return loss

        return step

    twins = Twins(make)
    for _ in range(4):
        assert twins.run(1) == 0
        x, y = (t.to(DEVICE) for t in twins.batch())
        for training in twins.both:
            training.step(x, y).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
    assert "whose gradients can still be computed" in caplog.text


def test_results_are_of_the_same_kind_as_without_capture(caplog) -> None:
    caplog.set_level(logging.INFO, "lazyxla")
    model = nn.Linear(4, 4).to(DEVICE)
    step = lazyxla.compile(torch.inference_mode()(model.forward), capture=True)
    make = lazyxla.compile(lambda x: nn.Parameter(model(x).detach(), False), capture=True)
    x = torch.ones(2, 4, device=DEVICE)
    with counted() as n:
        assert all(step(x).is_inference() for _ in range(4))
    assert n.captured_steps > 0
    assert all(type(make(x)) is nn.Parameter for _ in range(4))
    assert "it returns a new parameter" in caplog.text


# --- What is never captured ----------------------------------------------------------------------

_steps = itertools.count()
_seen: list[torch.Tensor] = []
_say = print


class Draws(torch.Generator):
    """It has attributes, and in C++ a state."""


_draws = Draws()


@pytest.mark.parametrize(
    ("why", "act"),
    [
        ("a value is read", lambda t, x: x * float(x.sum() > 0)),
        ("it calls print()", lambda t, x: (print("step"), x)[1]),
        ("it calls print()", lambda t, x: (_say("step"), x)[1]),
        ("of a class that is not", lambda t, x: x * (torch.rand((), generator=_draws) < 2).item()),
        ("time.time", lambda t, x: x * (time.time() > 0)),
        ("a count, which cannot be compared", lambda t, x: x * (next(_steps) % 2)),
        ("it changes what it reads", lambda t, x: (_seen.append(x), x)[1]),
        ("draws random numbers on the CPU", lambda t, x: x * (torch.rand(()) > 0.5).item()),
        ("copies one to the device", lambda t, x: x + torch.tensor([1.0] * 8).to(x.device)),
        ("lazyxla", lambda t, x: x * min(lazyxla.counters()["compiles"], 1)),
        ("reads data_ptr", lambda t, x: x * (x.data_ptr() > 0)),
    ],
)
def test_what_cannot_be_guarded_is_not_captured(why: str, act, caplog, capsys) -> None:
    caplog.set_level(logging.INFO, "lazyxla")
    twins = Twins(loss_of(lambda t, x: t.model(act(t, x))))
    torch.manual_seed(1)
    for _ in range(5):
        x, y = (t.to(DEVICE) for t in twins.batch())
        with counted() as n:
            twins.captured.step(x, y)
        assert n.captured_steps == 0
    assert why in caplog.text
    del _seen[:]


def test_an_attribute_that_is_set_by_a_name_that_is_made_up() -> None:
    options = type("Options", (), {})()
    model, name = nn.Linear(4, 4).to(DEVICE), "sc"

    @lambda f: lazyxla.compile(f, capture=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        object.__setattr__(options, name + "ale", 1.0)
        return model(x).detach()

    for _ in range(6):
        options.scale = 0.5
        step(torch.ones(2, 4, device=DEVICE))
        assert options.scale == 1.0


def test_a_gradient_scaler() -> None:
    scalers = iter([torch.amp.GradScaler(DEVICE, init_scale=8.0) for _ in range(2)])

    def make(training: Training) -> Step:
        scaler = next(scalers)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.mse_loss(training.model(x), y)
            scaler.scale(loss).backward()
            scaler.step(training.optimizer)
            scaler.update()
            training.optimizer.zero_grad()
            return loss.detach()

        return step

    Twins(make).run(6)


def test_an_exception_in_the_step() -> None:
    def make(training: Training) -> Step:
        training.config.fail = False
        inner = plain_step(training)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if training.config.fail:
                raise ValueError("as told")
            return inner(x, y)

        return step

    twins = Twins(make)
    twins.settle()
    for fail in (True, False):
        for training in twins.both:
            training.config.fail = fail
        if fail:
            for training in twins.both:
                with pytest.raises(ValueError, match="as told"):
                    training.step(*(t.to(DEVICE) for t in twins.batch()))
    assert twins.run(2) == 2


# --- Threads, memory, and the form ---------------------------------------------------------------


def test_several_threads_take_each_step_once() -> None:
    weight = nn.Parameter(torch.zeros(4, device=DEVICE))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    @lambda f: lazyxla.compile(f, capture=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight * x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = torch.ones(4, device=DEVICE)
    # New threads have another default dtype for autocast than the first one.
    first = threading.Thread(target=lambda: [step(x) for _ in range(4)])
    first.start()
    first.join()
    with counted() as n:
        threads = [threading.Thread(target=lambda: [step(x) for _ in range(25)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert n.captured_steps == 100
    assert_same(weight.detach(), torch.full((4,), -104.0))


def test_nothing_is_kept_alive_by_a_step_that_is_gone() -> None:
    twins = Twins()
    twins.settle()
    model = weakref.ref(twins.captured.model[0].weight)
    twins.captured.config.me = twins.captured  # a cycle through the step
    del twins
    gc.collect()
    assert model() is None


def test_memory_is_given_away_unless_somebody_else_has_it() -> None:
    twins = Twins(optimizer=adam)
    twins.settle()
    weight = twins.captured.model[0].weight

    def address() -> int:
        lazyxla.sync(wait=True)
        return lazyxla.host_view(weight).data_ptr()

    before = address()
    assert twins.run(1) == 1
    assert address() == before  # the new values are where the old ones were
    held = lazyxla.host_view(weight)
    values = held.clone()
    assert twins.run(2) == 2
    assert address() != before
    assert torch.equal(held, values)


def test_what_is_saved_for_a_backward_is_not_overwritten() -> None:
    twins = Twins()
    twins.settle()
    x, y = (t.to(DEVICE) for t in twins.batch())
    loss = twins.captured.model(x).sum()
    twins.captured.step(x, y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_form_of_compile() -> None:
    decorate = lazyxla.compile(capture=True, name="mine")

    @decorate
    def step(x: torch.Tensor) -> torch.Tensor:
        """Says what it does."""
        return x + 1

    assert step.__doc__ == "Says what it does."
    assert_same(step(torch.ones(3, device=DEVICE)), torch.full((3,), 2.0))
    with pytest.raises(TypeError, match="captures functions"):
        lazyxla.compile(nn.Linear(2, 2), capture=True)
    with pytest.raises(TypeError, match="captures functions"):
        lazyxla.compile(_generator, capture=True)
    with pytest.raises(TypeError, match="takes a function"):
        lazyxla.compile(SimpleNamespace, capture=True)


def _generator() -> Iterator[int]:
    yield 1


def test_a_learning_rate_that_the_step_reads_is_a_number() -> None:
    def make(training: Training) -> Step:
        inner = plain_step(training)

        def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, float]:
            return inner(x, y), training.optimizer.param_groups[0]["lr"]

        return step

    twins = Twins(make, optimizer=adam)
    twins.settle()
    for training in twins.both:
        training.optimizer.param_groups[0]["lr"] = 0.02
    assert twins.run(1) == 0
    twins.settle()


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("how", ["state_dict", "repr", "format"])
def test_what_a_step_returns_of_an_optimizer_tells_its_learning_rate(optimizer, how: str) -> None:
    """Within the step, too, a group has the numbers that its user gave it."""

    def shown(of: torch.optim.Optimizer) -> Any:
        if how == "state_dict":
            return of.state_dict()
        return repr(of) if how == "repr" else f"{of}"

    def make(training: Training) -> Step:
        inner = plain_step(training)

        def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return inner(x, y), shown(training.optimizer)

        return step

    twins = Twins(make, optimizer=optimizer)
    for rate in (0.1, 0.1, 0.1, 0.1, 0.1, 0.02, 0.02):
        for training in twins.both:
            training.optimizer.param_groups[0]["lr"] = rate
        x, y = (t.to(DEVICE) for t in twins.batch())
        with counted() as n:
            results = [training.step(x, y)[1] for training in twins.both]
        if how == "state_dict":
            results = [state["param_groups"] for state in results]
            assert type(results[0][0]["lr"]) is float
        assert results[0] == results[1]
    assert n.captured_steps == 1


def test_other_text_that_a_step_returns_keeps_learning_rates_as_inputs() -> None:
    def make(training: Training) -> Step:
        inner = plain_step(training)
        return lambda x, y: {"loss": inner(x, y), "name": f"{training.model[0].in_features}"}

    twins, captured = Twins(make), 0
    for rate in (0.1, 0.1, 0.1, 0.1, 0.02, 0.03):
        for training in twins.both:
            training.optimizer.param_groups[0]["lr"] = rate
        x, y = (t.to(DEVICE) for t in twins.batch())
        with counted() as n:
            result = twins.captured.step(x, y)
        captured = captured + 1 if n.captured_steps else 0
        assert result["name"] == "8"
        twins.compare(result["loss"], twins.other.step(x, y)["loss"])
    assert captured >= 3


def test_hooks_of_an_optimizer_save_the_numbers_of_its_groups() -> None:
    saved: list[Any] = []

    def make(training: Training) -> Step:
        training.optimizer.register_step_post_hook(lambda o, _, __: saved.append(o.state_dict()))
        return plain_step(training)

    twins = Twins(make, optimizer=adam)
    twins.run()
    groups = [state["param_groups"][0] for state in saved]
    assert len(groups) == 8
    assert {(type(group["lr"]), group["capturable"]) for group in groups} == {(float, False)}
