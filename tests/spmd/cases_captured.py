"""Captured steps whose tensors are spread over devices agree with the CPU, whatever is changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import one_process
from models import MESH, PLANS, Mlp, batches
from random_training import RandomTraining, on_host
from torch.nn import functional as F

import lazyxla
from tests.support import DEVICE, counted

SETTLED = 4
"""Steps after a change, of which the last one runs what was captured: one that makes what later
ones use, one that is captured, and one more where a number has become an input."""


class CapturedTraining(RandomTraining):
    """Each event is followed by the same step until that has settled."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.draw_batch()
        self.capture()

    def draw_batch(self) -> None:
        x, spread, y = self.batch()
        self.drawn = x, spread, y, y.to(DEVICE)

    def capture(self) -> None:
        device, optimizer = self.device, self.optimizers[1]

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return train(device, optimizer, x, y)

        self.captured = lazyxla.compile(step, capture=True)

    def take_parameters(self) -> None:
        super().take_parameters()
        self.capture()

    def spread_batch(self) -> None:
        x, _, y, target = self.drawn
        self.drawn = x, lazyxla.shard(x.clone(), self.mesh, self.spec_for(x)), y, target

    def adopt(self) -> None:
        """Gives the CPU what the device has, so that rounding errors do not add up."""
        theirs = dict([*self.cpu.named_parameters(), *self.cpu.named_buffers()])
        for name, tensor in self.named():
            theirs[name].detach().copy_(tensor.detach())
        self.optimizers[0].load_state_dict(on_host(self.optimizers[1].state_dict()))

    # Tensors that a captured step refers to cannot be swapped.
    def events(self) -> list[Callable[[], None]]:
        return [
            *(self.write, self.copy, self.load, self.data, self.assign),
            *(self.draw_batch, self.spread_batch, self.nothing),
        ]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            event = self.rng.choice(self.events())
            self.lines.append(event.__name__)
            event()
            for _ in range(SETTLED):
                x, spread, y, target = self.drawn
                expected = train(self.cpu, self.optimizers[0], x, y)
                lazyxla.sync()
                with counted() as n:
                    result = self.captured(spread, target)
                self.lines.append(f"  captured: {n.captured_steps}")
                self.check([expected, result])
            assert (n.captured_steps, n.compiles, n.executions) == (1, 0, 1), event.__name__
            self.adopt()


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "number" in metafunc.fixturenames:
        metafunc.parametrize("number", range(max(1, metafunc.config.getoption("--programs") // 50)))


@one_process  # the meshes are of some devices
def test_random_trainings(number: int) -> None:
    training = CapturedTraining(random.Random(number))
    try:
        training.run(3)
    except BaseException as error:
        error.add_note("\n".join(training.lines))
        raise


@pytest.mark.parametrize("plan", sorted(PLANS))
def test_each_plan(plan: str) -> None:
    """Ten steps of a captured step, and of the same on one device."""

    def run(spread: bool) -> list[Any]:
        torch.manual_seed(0)
        model = Mlp().to(DEVICE)
        if spread:
            lazyxla.shard(model, MESH, PLANS[plan])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step = lazyxla.compile(lambda x, y: train(model, optimizer, x, y), capture=True)
        losses = []
        for number, (x, y) in enumerate(batches(Mlp, 10)):
            x, y = x.to(DEVICE), y.to(DEVICE)
            if spread:
                x = lazyxla.shard(x, MESH, ("data",))
            lazyxla.sync()
            with counted() as n:
                losses.append(step(x, y))
            if number >= SETTLED:
                assert (n.captured_steps, n.compiles, n.executions) == (1, 0, 1)
        if spread:
            for p in model.parameters():
                assert lazyxla.sharding(p.grad) == lazyxla.sharding(p)
        return [torch.stack(losses).cpu(), *(p.detach().cpu() for p in model.parameters())]

    torch.testing.assert_close(run(True), run(False))
