"""Two runs of the same training, one with captured steps and one without, for tests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import lazyxla
from tests.support import DEVICE, counted

SETTLED = 4  # calls after which a step is captured

Step = Callable[..., Any]
MakeStep = Callable[["Training"], Step]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


class Config:
    """What a test puts there."""


@dataclass
class Training:
    """A model, its optimizer, and what else a step may read."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    config: Any = field(default_factory=lambda: Config())
    step: Step = None  # type: ignore[assignment]


def plain_step(training: Training) -> Step:
    model, optimizer = training.model, training.optimizer

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def loss_of(output: Callable[[Training, torch.Tensor], torch.Tensor]) -> Any:
    """Makes a step whose loss is computed from this output."""

    def make(training: Training) -> Step:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.mse_loss(output(training, x), y)
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            return loss.detach()

        return step

    return make


class Twins:
    """The same training twice: `captured` by lazyxla.compile(step, capture=True), and `other` by
    plain lazy steps, or on the CPU. What is done to one is to be done to both."""

    def __init__(
        self,
        make_step: MakeStep = plain_step,
        *,
        model: Callable[[], nn.Module] = network,
        optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
        device: str = DEVICE,
    ) -> None:
        torch.manual_seed(0)
        original = model()
        self.device = device
        self.captured = self._training(original, DEVICE, optimizer)
        self.other = self._training(original, device, optimizer)
        for training in self.both:
            training.step = make_step(training)
        self.captured.step = lazyxla.compile(self.captured.step, capture=True)
        self.size = 6
        self.dtype = torch.float32
        self._batch = 0

    @staticmethod
    def _training(original: nn.Module, device: str, optimizer: Any) -> Training:
        model = copy.deepcopy(original).to(device)
        return Training(model, optimizer(model.parameters()))

    @property
    def both(self) -> tuple[Training, Training]:
        return self.captured, self.other

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        self._batch += 1
        generator = torch.Generator().manual_seed(self._batch)
        x = torch.randn(self.size, 8, generator=generator, dtype=self.dtype)
        return x, torch.randn(self.size, 4, generator=generator, dtype=self.dtype)

    def run(self, steps: int = SETTLED, *more: Any, **named: Any) -> int:
        """Runs steps of both and compares all that there is; returns how many were captured."""
        total = 0
        for _ in range(steps):
            x, y = self.batch()
            x_there, y_there = x.to(DEVICE), y.to(DEVICE)
            lazyxla.sync()
            seed = torch.lazyxla.get_rng_state()
            with counted() as n:
                result = self.captured.step(x_there, y_there, *more, **named)
            total += n.captured_steps
            if n.captured_steps:  # one execution, and nothing else
                assert (n.executions, n.compiles, n.nodes_recorded, n.flushes) == (1, 0, 0, 0)
            after = torch.lazyxla.get_rng_state()
            torch.lazyxla.set_rng_state(seed)  # the other draws the same numbers
            expected = self.other.step(x.to(self.device), y.to(self.device), *more, **named)
            lazyxla.sync()
            assert torch.equal(torch.lazyxla.get_rng_state(), after) or self.device == "cpu"
            torch.lazyxla.set_rng_state(after)
            self.compare(result, expected)
        return total

    def compare(self, result: Any, expected: Any) -> None:
        torch.testing.assert_close(on_host(result), on_host(expected))
        a, b = ([dict(t.model.state_dict()), gradients(t.model)] for t in self.both)
        torch.testing.assert_close(on_host(a), on_host(b))
        a, b = (t.optimizer.state_dict() for t in self.both)
        torch.testing.assert_close(numbers_of(a["state"]), numbers_of(b["state"]))
        assert a["param_groups"] == b["param_groups"]

    def settle(self) -> None:
        """Runs steps until they are captured."""
        self.run()
        assert self.run(2) == 2


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def numbers_of(state: dict[Any, Any]) -> dict[Any, Any]:
    """An optimizer's state on the host; step counts may be on the device or not."""
    return {
        key: {k: v for k, v in on_host(each).items() if v is not None}
        for key, each in state.items()
    }


def on_host(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu()
    if isinstance(tree, (tuple, list)):
        return type(tree)(on_host(each) for each in tree)
    if isinstance(tree, dict):
        return {key: on_host(each) for key, each in tree.items()}
    return tree
