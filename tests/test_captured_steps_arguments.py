"""Captured steps: what they are called with."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lazyxla
from tests.step_twins import MakeStep, Step, Training, Twins, loss_of, network, plain_step, sgd
from tests.support import DEVICE, counted

# --- Arguments -----------------------------------------------------------------------------------


def step_in_float32(training: Training) -> Step:
    step = plain_step(training)
    return lambda x, y: step(x.float(), y.float())


def test_other_shapes_and_dtypes_are_captured_apart() -> None:
    twins = Twins(step_in_float32)
    twins.settle()
    for size in (3, 9):
        twins.size = size
        assert twins.run(1) == 0
        twins.settle()
    for size in (6, 3, 9, 6):
        twins.size = size
        assert twins.run(1) == 1
    twins.dtype = torch.float64
    assert twins.run(1) == 0


def test_an_argument_that_lies_in_another_way() -> None:
    step = lazyxla.compile(loss_of(lambda t, x: t.model(x)), capture=False)
    twins = Twins(step)
    twins.settle()
    x, y = (t.to(DEVICE) for t in twins.batch())
    turned = x.t().contiguous().t()
    with counted() as n:
        result = twins.captured.step(turned, y)
    assert n.captured_steps == 0
    twins.compare(result, twins.other.step(turned, y))


def test_views_of_larger_tensors() -> None:
    twins = Twins(loss_of(lambda t, x: t.model(x)))
    xs, ys = torch.randn(64, 8), torch.randn(64, 4)
    xs_there, ys_there = xs.to(DEVICE), ys.to(DEVICE)
    captured = 0
    for i in range(0, 60, 6):
        with counted() as n:
            result = twins.captured.step(xs_there[i : i + 6], ys_there[i : i + 6])
        captured += n.captured_steps
        twins.compare(result, twins.other.step(xs[i : i + 6].to(DEVICE), ys[i : i + 6].to(DEVICE)))
    assert captured <= 10  # a view that begins elsewhere is another argument


def test_numbers_and_strings_among_the_arguments() -> None:
    def make(training: Training) -> Step:
        inner = training.model

        def step(x, y, weight: float, *, kind: str = "mean") -> torch.Tensor:
            loss = F.mse_loss(inner(x), y, reduction=kind) * weight
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            return loss.detach()

        return step

    twins = Twins(make)
    twins.run(3, 1.0)
    assert twins.run(2, 1.0) == 2
    assert twins.run(1, 0.5) == 0
    twins.run(3, 0.5)
    assert twins.run(2, 0.5) == 2
    assert twins.run(1, 1.0) == 1
    assert twins.run(1, 1.0, kind="sum") == 0
    assert twins.run(1, -0.0) == 0


def test_containers_among_the_arguments() -> None:
    def make(training: Training) -> Step:
        inner = plain_step(training)

        def step(batch: dict[str, Any]) -> torch.Tensor:
            return inner(batch["x"], batch["more"][0])

        return step

    twins = Twins(make)
    captured = 0
    for _ in range(6):
        x, y = (t.to(DEVICE) for t in twins.batch())
        with counted() as n:
            result = twins.captured.step({"x": x, "more": [y]})
        captured += n.captured_steps
        twins.compare(result, twins.other.step({"x": x, "more": [y]}))
    assert captured >= 3
    with counted() as n:
        twins.captured.step({"x": x, "more": [y, y]})
    assert n.captured_steps == 0


def test_what_a_step_does_to_its_arguments_is_done_at_each_call(caplog) -> None:
    """A list that it appends to, a dict that it sets, each also if that is as it was before."""

    def step_of(act: Callable[[Any, torch.Tensor], object]) -> MakeStep:
        def make(training: Training) -> Step:
            plain = plain_step(training)

            def step(x: torch.Tensor, y: torch.Tensor, holder: Any) -> torch.Tensor:
                loss = plain(x, y).detach()
                act(holder, loss)
                return loss

            return step

        return make

    log: list[float] = []
    x, y = torch.randn(6, 8, device=DEVICE), torch.randn(6, 4, device=DEVICE)
    appends = Twins(step_of(lambda log, loss: log.append(1.0)))
    with caplog.at_level(logging.INFO, "lazyxla"):
        for count in range(1, 7):
            appends.captured.step(x, y, log)
            assert len(log) == count
    assert "is not captured: it changes what its arguments hold" in caplog.text
    sets = Twins(step_of(lambda options, loss: options.update(scale=0.5)))
    for before in [1.0] * 4 + [0.5] * 4 + [1.0] * 4:
        options = {"scale": before}
        sets.captured.step(x, y, options)
        assert options == {"scale": 0.5}
    keeps = Twins(step_of(lambda losses, loss: losses.append(loss)))
    losses: list[torch.Tensor] = []
    for count in range(1, 7):
        keeps.captured.step(x, y, losses)
        assert len(losses) == count


def test_arguments_that_share_memory() -> None:
    twins = Twins(model=lambda: nn.Linear(4, 4))
    x = torch.randn(6, 4).to(DEVICE)
    for _ in range(5):
        twins.compare(twins.captured.step(x + 1, x), twins.other.step(x + 1, x))
    with counted() as n:
        result = twins.captured.step(x, x)
    assert n.captured_steps == 0
    twins.compare(result, twins.other.step(x, x))
    results = []
    for training in twins.both:
        weight = training.model.weight.detach()
        with counted() as n:
            results.append(training.step(weight, torch.zeros(4, 4, device=DEVICE)))
        assert n.captured_steps == 0
    twins.compare(*results)


def test_a_model_and_an_optimizer_as_arguments() -> None:
    @lambda f: lazyxla.compile(f, capture=True)
    def step(model, optimizer, x) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    pairs = []
    for _ in range(2):
        model = network().to(DEVICE)
        pairs.append((model, sgd(model.parameters())))
    x = torch.randn(6, 8).to(DEVICE)
    for _ in range(4):
        for model, optimizer in pairs:
            step(model, optimizer, x)
    for model, optimizer in pairs:
        before = model[0].weight.detach().clone()
        with counted() as n:
            step(model, optimizer, x)
        assert n.captured_steps == 1
        assert not torch.equal(before.cpu(), model[0].weight.detach().cpu())


def test_an_argument_on_the_cpu_is_told(caplog) -> None:
    caplog.set_level(logging.INFO, "lazyxla")
    twins = Twins(loss_of(lambda t, x: t.model(x.to(DEVICE))))
    for _ in range(4):
        x, y = twins.batch()
        twins.compare(twins.captured.step(x, y.to(DEVICE)), twins.other.step(x, y.to(DEVICE)))
    assert "an argument is on the CPU" in caplog.text


def test_an_argument_that_holds_itself_is_told(caplog) -> None:
    caplog.set_level(logging.INFO, "lazyxla")

    @lazyxla.compile(capture=True)
    def step(arguments: list[Any]) -> torch.Tensor:
        result: torch.Tensor = arguments[0] + 1
        return result

    ring: list[Any] = [torch.ones(2, device=DEVICE)]
    ring.append(ring)
    for _ in range(4):
        with counted() as n:
            assert step(ring).tolist() == [2, 2]
        assert n.captured_steps == 0
    assert "an argument holds itself" in caplog.text


@pytest.mark.parametrize("why", ["an argument on the CPU", "a hook", "a mode", "itself"])
def test_the_error_of_a_step_that_is_not_captured_is_its_own(why: str) -> None:
    """What kept it from being captured is no error, and none that another came of."""
    weight = torch.ones(2, device=DEVICE, requires_grad=True)
    device = "cpu" if why == "an argument on the CPU" else DEVICE
    arguments: list[Any] = [torch.ones(2, device=device)]
    if why == "a hook":
        weight.register_hook(lambda gradient: None)
    if why == "itself":
        arguments.append(arguments)

    @lazyxla.compile(capture=True)
    def step(arguments: list[Any]) -> torch.Tensor:
        return (arguments[0].to(DEVICE) + weight) @ torch.ones(3, device=DEVICE)

    around = torch.device(DEVICE) if why == "a mode" else contextlib.nullcontext()
    for _ in range(3):
        with counted() as n, around, pytest.raises(RuntimeError, match="size") as raised:
            step(arguments)
        assert raised.value.__context__ is None
        assert n.captured_steps == 0
