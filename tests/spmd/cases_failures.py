"""Steps of sharded training that fail, at random: each tensor has its old value, spread as before.

The plugin is tests/plugins/failing.cpp. A program fails to compile, is refused, or fails on one of
its devices while it runs; what it had consumed then is lost, and named.
``pytest "tests/test_spmd.py::test_on_eight_devices[cases_failures.py]" --programs 8000`` tries
more.
"""

from __future__ import annotations

import ctypes
import os
import random
from typing import Any, ClassVar

import pytest
import torch
from random_sharded import check_sharding
from random_training import RandomTraining
from torch.nn import functional as F

import lazyxla
from tests.support import DEVICE

SHARE = 100  # there is a training for so many programs
STEPS = 8
STAGES = ["compile", "execute", "later", "later"]

plugin = ctypes.CDLL(os.environ["LAZYXLA_PLUGIN_PATH"])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("number", range(metafunc.config.getoption("--programs") // SHARE))


class FailingTraining(RandomTraining):
    # None counts steps on the host, which is not undone.
    optimizer_kinds: ClassVar = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-3),
    }

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.in_region = rng.random() < 0.5
        self.batches: Any = None
        self.failures: list[str] = []

    def batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.batches is None or self.rng.random() < 0.4:
            self.batches = super().batch()
        return self.batches

    def tensors(self, which: int) -> dict[str, torch.Tensor]:
        """The model's and the optimizer's, of the CPU (0) or of the device (1)."""
        model = (self.cpu, self.device)[which]
        found = dict([*model.named_parameters(), *model.named_buffers()])
        for name, p in model.named_parameters():
            for key, value in self.optimizers[which].state.get(p, {}).items():
                if isinstance(value, torch.Tensor) and key != "step":
                    found[f"{key} of {name}"] = value
        return {name: tensor.detach() for name, tensor in found.items()}

    def train(self, which: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss((self.cpu, self.device)[which](x), y)
        loss.backward()
        self.optimizers[which].step()
        return loss.detach()

    def run_on_device(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.in_region:
            with lazyxla.compile():
                return self.train(1, x, y)
        return self.train(1, x, y)

    def step(self, stage: str | None) -> None:
        x, spread, y = self.batch()
        target = y.to(DEVICE)
        lazyxla.sync(wait=True)
        kept = self.rng.random() < 0.5  # by other references, so that programs consume nothing
        copies = [t.clone() for t in self.tensors(1).values()] if kept else []
        lazyxla.sync(wait=True)
        self.lines.append(f"step, fails: {stage}, kept: {kept}")
        if stage:
            plugin.fail_on(self.rng.randrange(8))
            plugin.fail_after(stage.encode(), 0, 1)
        error = None
        try:
            loss = self.run_on_device(spread, target)
            lazyxla.sync(wait=True)
        except RuntimeError as caught:
            error = str(caught)
        finally:
            plugin.fail(b"", 0)
        if error is None:
            # A program that is known is not compiled.
            assert stage in (None, "compile"), "a failure was not told"
            self.check([self.train(0, x, y), loss])
        else:
            self.failures.append(error)
            self.lines.append(error)
            self.check_failed(error, may_lose=stage == "later" and not kept)
        del copies
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def check_failed(self, error: str, may_lose: bool) -> None:
        """All is as it was; puts back what is lost, which the error names."""
        assert "no memory in this test" in error
        lazyxla.sync(wait=True)  # told once
        lost = []
        ours, theirs = self.tensors(1), self.tensors(0)
        for name, tensor in ours.items():
            spec = self.specs[name.rpartition(" of ")[2]]
            try:
                value = tensor.cpu()
            except torch.OutOfMemoryError:
                lost.append(name)
                tensor.copy_(theirs[name])
                if name not in self.specs:  # the optimizer's may be spread as its value was
                    lazyxla.shard(tensor, self.mesh, spec)
            else:
                torch.testing.assert_close(value, theirs[name], msg=name)
            check_sharding(tensor, self.mesh, spec, name)
        assert may_lose or not lost
        assert (f"{len(lost)} tensor" in error) == bool(lost), f"lost: {lost}"
        for name in lost:
            assert name in error
        lazyxla.sync(wait=True)

    def run(self, steps: int) -> None:
        self.step(None)  # makes the optimizer's state
        for _ in range(steps):
            event = self.rng.choice([self.nothing, self.nothing, self.write])
            self.lines.append(event.__name__)
            event()
            self.step(self.rng.choice([None, *STAGES]))


def test_failing_trainings(number: int) -> None:
    training = FailingTraining(random.Random(number))
    try:
        training.run(STEPS)
    except BaseException as error:
        error.add_note("\n".join(training.lines))
        raise
    assert training.failures
