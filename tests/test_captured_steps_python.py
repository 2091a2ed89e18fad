"""Captured steps: what their Python code reads, and the state of PyTorch."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import lazyxla
from tests.step_twins import Step, Training, Twins, loss_of
from tests.support import DEVICE, counted

SCALE = 1.0
OPTIONS = {"scale": 1.0}


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


class Halving(torch.autograd.Function):
    factor = 0.5

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x * Halving.factor

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad * Halving.factor


class Block(nn.Module):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.options = {"scale": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale * self.options["scale"]


@pytest.fixture(autouse=True)
def modes_stay_as_they_are() -> Iterator[None]:
    state = lazyxla._C.torch_state()
    yield
    assert lazyxla._C.torch_state() == state


def _changed(twins: Twins, change: Callable[[], object]) -> None:
    """Settles, changes something, and expects that the code runs once and then is captured."""
    twins.settle()
    change()
    assert twins.run(1) == 0
    twins.settle()


# --- What the code reads -------------------------------------------------------------------------


def test_a_variable_of_the_closure() -> None:
    factor = 1.0

    def set_factor() -> None:
        nonlocal factor
        factor = 0.5

    _changed(Twins(loss_of(lambda t, x: t.model(x) * factor)), set_factor)


@pytest.mark.parametrize("where", ["scaled", "here"])
def test_a_global(where: str, monkeypatch) -> None:
    output = {"scaled": lambda t, x: scaled(t.model(x)), "here": lambda t, x: t.model(x) * SCALE}
    twins = Twins(loss_of(output[where]))
    _changed(twins, lambda: monkeypatch.setitem(globals(), "SCALE", 0.5))


def test_an_element_of_a_global_dict(monkeypatch) -> None:
    twins = Twins(loss_of(lambda t, x: t.model(x) * OPTIONS["scale"]))
    _changed(twins, lambda: monkeypatch.setitem(OPTIONS, "scale", 0.5))


def test_a_function_that_is_replaced(monkeypatch) -> None:
    twins = Twins(loss_of(lambda t, x: scaled(t.model(x))))
    _changed(twins, lambda: monkeypatch.setitem(globals(), "scaled", lambda x: x * 0.5))


def test_a_function_of_torch_that_is_replaced(monkeypatch) -> None:
    twins = Twins(loss_of(lambda t, x: t.model(x)))
    mse_loss = F.mse_loss
    _changed(twins, lambda: monkeypatch.setattr(F, "mse_loss", lambda a, b: mse_loss(a, b) * 0.5))


def test_modules_in_the_closure(monkeypatch) -> None:
    functions, values = F, math
    monkeypatch.setattr(values, "scale", 1.0, raising=False)
    twins = Twins(loss_of(lambda t, x: functions.relu(t.model(x)) * values.scale))
    _changed(twins, lambda: monkeypatch.setattr(values, "scale", 0.5))
    framework = torch
    seeded = Twins(loss_of(lambda t, x: (framework.manual_seed(1), t.model(x))[1]))
    assert seeded.run(5) == 0


def test_a_function_s_default() -> None:
    def output(t: Training, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return t.model(x) * scale

    def change() -> None:
        output.__defaults__ = (0.5,)

    _changed(Twins(loss_of(output)), change)


@pytest.mark.parametrize(
    "scale",
    [
        lambda config: config.scale,
        lambda config: getattr(config, "scale"),  # noqa: B009
        lambda config: getattr(config, "scale", 0),
        lambda config: getattr(config, "scale", None),
    ],
)
def test_an_attribute_of_an_object(scale: Callable[[Any], float]) -> None:
    def make(training: Training) -> Step:
        training.config.scale = 1.0
        training.config.unused = iter([1])  # not compared, for the code does not name it
        return loss_of(lambda t, x: t.model(x) * scale(t.config))(training)

    twins = Twins(make)
    twins.settle()
    for training in twins.both:
        training.config.unused = iter([2])
    assert twins.run(2) == 2
    for training in twins.both:
        training.config.scale = 0.5
    assert twins.run(1) == 0
    twins.settle()


def test_an_attribute_whose_name_is_made_up() -> None:
    def make(training: Training) -> Step:
        training.config.scale1 = 1.0
        return loss_of(lambda t, x: t.model(x) * getattr(t.config, f"scale{len([x])}"))(training)

    twins = Twins(make)

    def change() -> None:
        for training in twins.both:
            training.config.scale1 = 0.5

    _changed(twins, change)


@pytest.mark.parametrize("what", ["class", "object", "dict", "method", "own method", "all of it"])
def test_a_module_of_one_s_own(what: str, monkeypatch) -> None:
    twins = Twins(model=Block)

    def change() -> None:
        for training in twins.both:
            if what == "class":
                monkeypatch.setattr(Block, "scale", 0.5)
            elif what == "object":
                training.model.scale = 0.5
            elif what == "dict":
                training.model.options["scale"] = 0.5
            elif what == "all of it":
                training.model.__dict__ = {**vars(training.model), "scale": 0.5}
            elif what == "method":
                monkeypatch.setattr(Block, "forward", lambda self, x: self.inner(x) * 0.5)
            else:
                inner = training.model.inner
                training.model.forward = lambda x, inner=inner: inner(x) * 0.5

    _changed(twins, change)


def test_a_class_with_annotations() -> None:
    """From Python 3.14 on a function of the class makes them, which a step does not call. They may
    be of anything; the import above makes all annotations of this file strings."""
    names: dict[str, Any] = {"__name__": __name__, "Block": Block, "io": io}
    source = "class Annotated(Block):\n    log: io.TextIOBase\n"
    exec(compile(source, __file__, "exec", dont_inherit=True), names)
    Twins(model=names["Annotated"]).settle()


def test_what_others_add_to_modules_and_nothing_names(monkeypatch) -> None:
    """As transformers does; such a method may do anything."""
    monkeypatch.setattr(nn.Module, "_of_another_library", lambda self: print(self), raising=False)
    Twins().settle()


def test_an_autograd_function(monkeypatch) -> None:
    twins = Twins(loss_of(lambda t, x: Halving.apply(t.model(x))))
    _changed(twins, lambda: monkeypatch.setattr(Halving, "factor", 0.25))


# --- PyTorch's state -----------------------------------------------------------------------------


def _with_autocast(training: Training) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = F.mse_loss(training.model(x), y)
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        return loss.detach()

    return step


def test_autocast_in_the_step() -> None:
    Twins(_with_autocast).settle()


def test_autocast_around_the_call(caplog) -> None:
    caplog.set_level(logging.INFO, "lazyxla")
    twins = Twins()
    twins.settle()
    for _ in range(3):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            assert twins.run(1) == 0
    assert "autocast is on around it" in caplog.text
    assert twins.run(1) == 1


def test_no_gradients_around_the_call() -> None:
    twins = Twins(loss_of(lambda t, x: t.model(x)))
    twins.settle()
    for training in twins.both:
        x, y = (t.to(DEVICE) for t in twins.batch())
        with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
            training.step(x, y)
    assert twins.run(2) == 2


def test_the_default_dtype() -> None:
    twins = Twins(loss_of(lambda t, x: t.model(x) + torch.ones(4, device=x.device).cos()))
    twins.settle()
    torch.set_default_dtype(torch.float64)
    try:
        assert twins.run(1) == 0
        twins.settle()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("what", ["matmul_precision", "deterministic", "settings"])
def test_other_settings_run_the_code(what: str, monkeypatch) -> None:
    twins = Twins()
    twins.settle()
    if what == "matmul_precision":
        torch.set_float32_matmul_precision("medium")
    elif what == "deterministic":
        torch.use_deterministic_algorithms(True)
    else:
        monkeypatch.setattr(lazyxla.settings, "check_indices", True)
    try:
        assert twins.run(1) == 0
        twins.settle()
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
    monkeypatch.undo()
    assert twins.run(1) == 1  # as it was captured first


def test_a_default_device_around_the_call(caplog) -> None:
    caplog.set_level(logging.INFO, "lazyxla")
    twins = Twins()
    twins.settle()
    for device in (DEVICE, "cpu"):
        x, y = (t.to(DEVICE) for t in twins.batch())
        with counted() as n, torch.device(device):
            results = [t.step(x, y) for t in twins.both]
        assert n.captured_steps == 0
        twins.compare(*results)
    assert "a mode is active" in caplog.text
    assert twins.run(1) == 1


def test_within_another_region_the_code_runs() -> None:
    twins = Twins()
    twins.settle()
    x, y = (t.to(DEVICE) for t in twins.batch())
    with counted() as n, lazyxla.compile():
        result = twins.captured.step(x, y)
    assert (n.captured_steps, n.executions) == (0, 1)
    expected = twins.other.step(x, y)
    twins.compare(result, expected)
    assert twins.run(1) == 1


def test_tangents() -> None:
    model = nn.Linear(4, 4).to(DEVICE).requires_grad_(False)
    step = lazyxla.compile(lambda x: model(x), capture=True)
    x = torch.ones(2, 4, device=DEVICE)
    with counted() as n:
        for _ in range(4):
            step(x)
    assert n.captured_steps > 0
    with forward_ad.dual_level():
        for _ in range(3):
            tangent = forward_ad.unpack_dual(step(forward_ad.make_dual(x, x))).tangent
            torch.testing.assert_close(tangent.cpu(), (x @ model.weight.t()).cpu())


@pytest.mark.parametrize("settled", [False, True])
def test_programs_that_are_captured_meanwhile(settled: bool) -> None:
    """They get a learning rate without data: the next step makes it anew."""
    twins = Twins()
    if settled:
        twins.settle()
    else:
        twins.run(1)
    twins.captured.optimizer.param_groups[0]["lr"] = 0.2
    x, y = (t.to(DEVICE) for t in twins.batch())
    with lazyxla.aot.capture():
        twins.captured.step(x, y)
    twins.other.optimizer.param_groups[0]["lr"] = 0.2
    twins.settle()


@pytest.mark.parametrize("mode", [True, "fused"])
def test_eager_modes(mode) -> None:
    twins = Twins()
    with lazyxla.eager_mode(mode):
        twins.settle()
