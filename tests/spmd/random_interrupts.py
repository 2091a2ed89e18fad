"""Training whose tensors are spread at random, and which is interrupted at random moments.

A step writes each tensor once, so that each has its old or its new value afterwards, whatever was
interrupted. The training goes on from there; nothing is put back.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from random_sharded import check_sharding
from random_training import RandomTraining
from torch.nn import functional as F

import lazyxla
from tests import interrupted_training
from tests.support import DEVICE

WAYS = ["lazy", "eager", "fused", "region", "captured"]
CALLS = 4000  # of Python functions in a step, at most


class InterruptedTraining(RandomTraining):
    optimizer_kinds: ClassVar = {"SGD": lambda p: torch.optim.SGD(p, lr=0.05)}

    def __init__(self, rng: random.Random, interrupted: interrupted_training.Interrupted) -> None:
        super().__init__(rng)
        for model in (self.cpu, self.device):  # which writes the statistics twice
            model.checkpointed &= not isinstance(model.norm, torch.nn.BatchNorm1d)
        self.interrupted = interrupted
        self.interrupts = 0
        self.way = rng.choice(WAYS)
        self.known = rng.random() < 0.5  # batches alike, so that programs are
        self.batches: Any = None
        device, optimizer = self.device, self.optimizers[1]

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return train(device, optimizer, x, y)

        self.captured = lazyxla.compile(step, capture=True)
        self.lines.append(f"# {self.way}, batches are {'alike' if self.known else 'new'}")

    def batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if not self.known or self.batches is None:
            self.batches = super().batch()
        return self.batches

    def values(self) -> dict[str, torch.Tensor | None]:
        """Of the CPU: the tensors and their gradients by name."""
        tensors = dict([*self.cpu.named_parameters(), *self.cpu.named_buffers()])
        found = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        gradients = {f"{name}.grad": tensor.grad for name, tensor in tensors.items()}
        return found | {k: None if v is None else v.clone() for k, v in gradients.items()}

    def run_on_device(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.way == "captured":
            return self.captured(x, y)
        if self.way == "region":
            with lazyxla.compile():
                return train(self.device, self.optimizers[1], x, y)
        with lazyxla.eager_mode({"lazy": False, "eager": True, "fused": "fused"}[self.way]):
            loss = train(self.device, self.optimizers[1], x, y)
            lazyxla.sync(wait=self.rng.random() < 0.3)
            return loss

    def step(self) -> None:
        x, spread, y = self.batch()
        target = y.to(DEVICE)
        lazyxla.sync()
        before = self.values()
        loss = train(self.cpu, self.optimizers[0], x, y)
        after = self.values()
        attempt = self.by_signal if self.rng.random() < 0.5 else self.by_call
        was_interrupted, result = attempt(lambda: self.run_on_device(spread, target))
        if was_interrupted:
            self.interrupts += 1
            self.adopt(before, after)
        else:
            self.check([loss, result])
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def by_signal(self, action: Callable[[], Any]) -> tuple[bool, Any]:
        return self.interrupted.attempt(action)

    def by_call(self, action: Callable[[], Any]) -> tuple[bool, Any]:
        """Interrupts a random call of a Python function."""
        at = int(math.exp(self.rng.uniform(0, math.log(CALLS))))
        return interrupted_training.interrupt_call(at, action)

    def adopt(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Checks what an interrupted step has left, and goes on from that."""
        theirs = dict([*self.cpu.named_parameters(), *self.cpu.named_buffers()])
        for name, tensor in self.named():
            check_sharding(tensor, self.mesh, self.specs[name], name)
            value = tensor.detach().cpu()
            check_one_of(value, before[name], after[name], name)
            theirs[name].detach().copy_(value)
            if tensor.grad is not None:
                gradient = f"{name}.grad"
                check_one_of(tensor.grad.cpu(), before[gradient], after[gradient], gradient)
                check_sharding(tensor.grad, self.mesh, self.specs[name], gradient)
        assert not lazyxla._C.in_region()
        assert lazyxla.eager_mode() is False
        assert type(self.optimizers[1].param_groups[0]["lr"]) is float
        # PyTorch's own no_grad leaves it off if it is interrupted while it puts it back.
        torch.set_grad_enabled(True)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            event = self.rng.choice([self.nothing, self.nothing, self.write, self.load])
            self.lines.append(event.__name__)
            event()
            lazyxla.sync()
            self.step()


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def check_one_of(
    value: torch.Tensor, before: torch.Tensor | None, after: torch.Tensor | None, name: str
) -> None:
    if before is not None and torch.equal(value, before):
        return
    assert after is not None
    try:
        torch.testing.assert_close(value, after)
    except AssertionError as error:
        if before is None:
            raise
        torch.testing.assert_close(
            value, before, msg=f"{name} has neither its new value ({error}) nor its old one"
        )
