"""Random training loops settle, and train as on the CPU.

Each does some of what people do in a loop (log, evaluate, schedule, clip, accumulate, save, ...),
each thing in every step, or in every second to fourth. After a few of their common periods nothing
is new any more.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyxla
from tests.support import DEVICE

STEPS, SETTLED = 60, 36
"""Of 12 steps each, at most, are the periods of all events together."""

OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    lambda p: torch.optim.Adam(p, lr=0.01),
    lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    lambda p: torch.optim.RMSprop(p, lr=0.003),
    lambda p: torch.optim.Adagrad(p, lr=0.02),
    lambda p: torch.optim.NAdam(p, lr=0.01),
]
SCHEDULES: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 100),
    lambda o: torch.optim.lr_scheduler.StepLR(o, 7, 0.9),
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
]
EVENTS = (
    *("smaller batch", "mixed batch", "replay", "penalty", "clip", "decay", "accumulate"),
    *("keep zeros", "schedule", "average", "log", "log the mean", "norms", "evaluate", "confusion"),
    *("save", "sync", "history", "print"),
)


class Loop:
    def __init__(self, device: str, seed: int) -> None:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.device, self.own = device, random.Random(seed)
        norm, activation = (
            draw.choice([nn.LayerNorm, nn.BatchNorm1d]),
            draw.choice([nn.GELU, nn.Tanh]),
        )
        layers = [nn.Linear(6, 8), activation(), norm(8), nn.Linear(8, 3)]
        self.model = nn.Sequential(*layers).double().to(device)
        self.mean = copy.deepcopy(self.model)
        self.optimizer = draw.choice(OPTIMIZERS)(self.model.parameters())
        self.schedule = draw.choice(SCHEDULES)(self.optimizer)
        self.buffer = torch.zeros(16, 6, device=device, dtype=torch.float64)
        self.history = torch.zeros(STEPS, device=device, dtype=torch.float64)
        self.losses: list[torch.Tensor] = []
        self.seen: list[Any] = []
        names = draw.sample(EVENTS, draw.randint(3, 7))
        self.events = {name: (draw.randint(1, 4), draw.randrange(4)) for name in names}

    def is_due(self, event: str, step: int) -> bool:
        every, phase = self.events.get(event, (0, 0))
        return every > 0 and (step + phase) % every == 0

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        size = 5 if self.is_due("smaller batch", step) else 8
        x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 3, (size,), generator=generator)
        return x.to(self.device), y.to(self.device)

    def inputs(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.batch(step)
        if self.is_due("replay", step):
            self.buffer[step % 16] = x[0]
            chosen = torch.tensor([self.own.randrange(16) for _ in range(len(x))])
            x = x + 0.1 * self.buffer[chosen.to(self.device)]
        if self.is_due("mixed batch", step):
            part = self.own.random()
            x = part * x + (1 - part) * x.flip(0)
        return x, y

    def step(self, step: int) -> None:
        x, y = self.inputs(step)
        penalized = self.is_due("penalty", step)
        output = self.model(x.requires_grad_(penalized))
        loss = F.cross_entropy(output, y)
        if penalized:
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + slope.square().sum()
        loss.backward()
        self.update(step)
        self.look(step, loss.detach(), output.detach(), y)

    def update(self, step: int) -> None:
        parameters = list(self.model.parameters())
        if self.is_due("norms", step):
            self.seen.append([p.grad.norm().item() for p in parameters if p.grad is not None])
        if self.is_due("clip", step):
            nn.utils.clip_grad_norm_(parameters, 1.0)
        if "accumulate" not in self.events or self.is_due("accumulate", step):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=not self.is_due("keep zeros", step))
        with torch.no_grad():
            if self.is_due("decay", step):
                for p in parameters:
                    p.mul_(1 - 0.001 * self.own.random())
            if self.is_due("average", step):
                for mean, p in zip(self.mean.parameters(), parameters):
                    mean.lerp_(p, 0.1)
        if self.is_due("schedule", step):
            self.schedule.step()

    def look(self, step: int, loss: torch.Tensor, output: torch.Tensor, y: torch.Tensor) -> None:
        if self.is_due("history", step):
            self.history[step] = loss
            self.seen.append(self.history[: step + 1][-4:].sum().item())
        if "log the mean" in self.events:
            self.losses.append(loss)
            if self.is_due("log the mean", step):
                self.seen.append(torch.stack(self.losses).mean().item())
                self.losses.clear()
        if self.is_due("log", step):
            self.seen.append(loss.item())
        if self.is_due("print", step):
            assert str(loss)
        if self.is_due("confusion", step):
            found = torch.zeros(3, 3, dtype=torch.long, device=self.device)
            ones = torch.ones_like(y)
            found.index_put_((y, output.argmax(1)), ones, accumulate=True)
            self.seen.append(found.sum().item())
        if self.is_due("evaluate", step):
            self.model.eval()
            with torch.no_grad():
                self.seen.append(self.model(self.batch(1000)[0]).abs().mean().item())
            self.model.train()
        if self.is_due("save", step):
            self.seen.append([value.cpu().sum() for value in self.model.state_dict().values()])
        if self.device != "cpu" and self.is_due("sync", step):
            lazyxla.sync()

    def results(self) -> list[torch.Tensor]:
        values = [*self.model.parameters(), *self.mean.parameters(), self.buffer, self.history]
        return [value.detach().cpu() for value in values]


@pytest.mark.parametrize("seed", range(12))
def test_random_loops(seed: int) -> None:
    ours, theirs = Loop(DEVICE, seed), Loop("cpu", seed)
    compiles = []
    for step in range(STEPS):
        ours.step(step)
        theirs.step(step)
        compiles.append(lazyxla.counters()["compiles"])
    assert compiles[-1] == compiles[SETTLED], (ours.events, compiles)
    torch.testing.assert_close(ours.seen, theirs.seen)
    torch.testing.assert_close(ours.results(), theirs.results())
