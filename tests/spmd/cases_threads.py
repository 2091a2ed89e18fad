"""Threads that train at once, with tensors that are spread over meshes of the same devices.

Each trains a random model of its own beside the same on the CPU. In between it computes with a
model that all threads read, hands tensors that are only recorded to another thread, reads what it
is handed, syncs and collects.
``pytest "tests/test_spmd.py::test_on_eight_devices[cases_threads.py]" --thread-rounds 300`` trains
longer.
"""

from __future__ import annotations

import copy
import gc
import queue
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_sharded import MESHES, check_sharding, random_spec
from random_training import RandomTraining

import lazyxla
from tests.support import DEVICE, run_all

THREADS = 4
Inbox = queue.Queue[tuple[torch.Tensor, torch.Tensor, Any]]


class SharedModel:
    """A model that threads read, and the same on the CPU; on a mesh of all devices."""

    def __init__(self, rng: random.Random) -> None:
        self.mesh = rng.choice([m for m in MESHES if len(m.devices) == 8 and len(m.shape) < 3])
        self.cpu = torch.nn.Sequential(
            torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 7)
        )
        self.device = copy.deepcopy(self.cpu).to(DEVICE)
        self.specs = {
            name: random_spec(rng.choice, self.mesh, p) for name, p in self.cpu.named_parameters()
        }
        lazyxla.shard(self.device, self.mesh, lambda name, tensor: self.specs[name])

    def read(self, rng: random.Random, x: torch.Tensor) -> None:
        """Its values, and the gradient of its input."""
        spread = lazyxla.shard(x.clone(), self.mesh, random_spec(rng.choice, self.mesh, x))
        results = []
        for model, given in ((self.cpu, x), (self.device, spread)):
            given.requires_grad_()
            y = model(given)
            (gradient,) = torch.autograd.grad(y.square().sum(), given)
            results.append([y.detach().cpu(), gradient.cpu()])
        torch.testing.assert_close(results[1], results[0])

    def look(self) -> None:
        for name, p in self.device.named_parameters():
            check_sharding(p, self.mesh, self.specs[name], name)
            assert torch.equal(p.detach().cpu(), self.cpu.get_parameter(name).detach())


class ThreadTraining(RandomTraining):
    def __init__(self, rng: random.Random, shared: SharedModel | None, index: int) -> None:
        super().__init__(rng)
        self.shared, self.index = shared, index
        self.inbox: Inbox = queue.Queue()
        self.outbox: Inbox = queue.Queue()

    def events(self) -> list[Callable[[], None]]:
        return [self.read_shared, self.hand_over, self.take, self.disturb, self.write, self.copy]

    def read_shared(self) -> None:
        x = torch.randn(5, 6, generator=self.numbers)
        if self.shared is None:
            return
        with torch.lazyxla.device(0):
            self.shared.read(self.rng, x)
            self.shared.look()

    def hand_over(self) -> None:
        """What is recorded, and read while this thread goes on."""
        x = torch.randn(8, 6, generator=self.numbers)
        spec = self.spec_for(x)
        y = lazyxla.shard(x.clone(), self.mesh, spec) * 2
        if self.rng.random() < 0.5:
            lazyxla.shard(y, self.mesh, spec)
            self.outbox.put((y, x * 2, (self.mesh, spec)))
        else:
            self.outbox.put((y.t() @ y, 4 * x.t() @ x, None))
        weight = self.device.first.weight.detach()
        self.outbox.put((weight + 1, self.cpu.first.weight.detach() + 1, None))

    def take(self) -> None:
        while not self.inbox.empty():
            value, expected, asked = self.inbox.get()
            if asked:
                check_sharding(value, *asked, "what was handed over")
            torch.testing.assert_close(value.cpu(), expected)

    def disturb(self) -> None:
        kind = self.rng.randrange(4)
        if kind == 0:
            time.sleep(self.rng.uniform(0, 0.01))
        elif kind == 1:
            gc.collect()
        elif kind == 2:
            lazyxla.sync(wait=True)
        else:
            self.device.last.weight.detach().sum().item()

    def work(self, steps: int) -> None:
        with torch.lazyxla.device(self.index):
            self.run(steps)
            self.take()


@pytest.mark.parametrize("number", range(3))
def test_threads_train(number: int, pytestconfig: pytest.Config) -> None:
    """On one device each has the model of its own; with `number` 2, on several."""
    rounds = pytestconfig.getoption("--thread-rounds") // 2  # most of them compile something
    rng = random.Random(number)
    shared = SharedModel(rng)
    trainings = []
    for i in range(THREADS):
        index = i if number == 2 else 0
        with torch.lazyxla.device(index):
            trainings.append(ThreadTraining(random.Random(10 * number + i), shared, index))
    for training, following in zip(trainings, trainings[1:] + trainings[:1]):
        training.outbox = following.inbox

    def work(training: ThreadTraining) -> None:
        try:
            training.work(rounds)
        except BaseException as error:
            error.add_note("\n".join(training.lines))
            raise

    run_all([lambda t=t: work(t) for t in trainings], seconds=300 + 10 * rounds)
    shared.look()
