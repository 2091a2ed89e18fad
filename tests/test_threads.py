"""Several threads: what one records is its own, and a tensor that is handed over has its value."""

from __future__ import annotations

import gc
import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lazyxla
from tests.support import DEVICE, run_all


class Trainer:
    """A small model of a shape of its own; all that it does is decided by its number."""

    def __init__(self, number: int, device: str) -> None:
        self.chance = random.Random(number)
        self.device = device
        # CPU random numbers are the process's: drawn one trainer after the other.
        torch.manual_seed(number)
        self.model = torch.nn.Linear(8 + number, 4).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.x = torch.randn(16, 8 + number).to(device)
        self.y = torch.randint(0, 4, (16,)).to(device)
        lazyxla.sync()

    def step(self) -> torch.Tensor:
        loss = F.cross_entropy(self.model(self.x), self.y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def train(self, steps: int, disturbed: bool, handed: Callable[[Any], None]) -> list[float]:
        losses = []
        for number in range(steps):
            way = number % 3
            if way == 0:
                with lazyxla.step():
                    loss = self.step()
            elif way == 1:
                loss = self.step()
                lazyxla.sync(wait=number % 2 == 0)
            else:
                with lazyxla.eager_mode("fused"):
                    loss = self.step()
            if disturbed:
                self.disturb()
            handed(loss * 2)  # pending in this thread
            losses.append(loss.item())
        return losses

    def disturb(self) -> None:
        kind = self.chance.randrange(5)
        if kind == 0:
            time.sleep(self.chance.uniform(0, 0.002))
        elif kind == 1:
            gc.collect()
        elif kind == 2:
            torch.set_float32_matmul_precision(self.chance.choice(["highest", "high"]))
        elif kind == 3:
            x = torch.ones(3, device=self.device) * 2
            del x
        else:
            (self.x + 1).sum().item()


def train_together(devices: int, steps: int) -> None:
    """Eight threads train, disturb each other and hand tensors over, on so many devices."""
    precision = torch.get_float32_matmul_precision()

    def trainers() -> list[Trainer]:
        return [Trainer(i, f"{DEVICE}:{i % devices}") for i in range(8)]

    expected = [t.train(steps, False, lambda _: None) for t in trainers()]
    got: list[list[float]] = [[] for _ in range(8)]
    inbox: list[queue.Queue[Any]] = [queue.Queue() for _ in range(8)]
    together = trainers()

    def work(i: int) -> None:
        read: list[float] = []

        def hand_over(value: torch.Tensor) -> None:
            inbox[(i + 1) % 8].put(value)
            while not inbox[i].empty():
                read.append(inbox[i].get().item())

        got[i] = together[i].train(steps, True, hand_over)
        time.sleep(0.05)
        while not inbox[i].empty():
            read.append(inbox[i].get().item())
        theirs = [2 * loss for loss in expected[(i - 1) % 8]]
        torch.testing.assert_close(torch.tensor(read), torch.tensor(theirs[: len(read)]))

    try:
        run_all([lambda i=i: work(i) for i in range(8)], seconds=300 + 2 * steps)
    finally:
        torch.set_float32_matmul_precision(precision)
    # Not bit for bit: what another thread reads of a step in fused mode cuts its programs.
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected))


def test_eight_threads_train_as_one_after_the_other(pytestconfig: pytest.Config) -> None:
    train_together(1, pytestconfig.getoption("--thread-rounds"))


def test_eight_threads_on_four_devices(
    run_python: Callable[..., Any], pytestconfig: pytest.Config
) -> None:
    rounds = pytestconfig.getoption("--thread-rounds")
    run_python(
        f"from tests.test_threads import train_together; train_together(4, {rounds})",
        LAZYXLA_CPU_DEVICES="4",
        timeout=600 + 4 * rounds,
    )


def test_a_region_is_one_program_whatever_other_threads_do() -> None:
    trainer = Trainer(3, DEVICE)
    for _ in range(3):
        with lazyxla.step():
            trainer.step()
    shown: queue.Queue[Any] = queue.Queue()
    over = threading.Event()

    def others() -> None:
        x = torch.ones(5, device=DEVICE)
        while not over.is_set():
            (x * 3).sum().item()
            lazyxla.sync(wait=True)
            while not shown.empty():
                assert shown.get().sum().item() == 26.0

    def steps() -> None:
        try:
            for _ in range(60):
                with lazyxla.step():
                    loss = trainer.step()
                    part = torch.ones(13, device=DEVICE) * 2
                    shown.put(part)  # read by another thread while the region is open
                    time.sleep(0.001)
                loss.item()
        finally:
            over.set()

    def keys_of_steps() -> None:
        lazyxla._C.trace_keys()
        steps()
        keys.extend(lazyxla._C.traced_keys())

    keys: list[int] = []
    run_all([keys_of_steps, others])
    assert len(set(keys)) <= 2, "a step was cut or changed"
    assert len(keys) in (60, 120)


def test_what_a_thread_leaves_pending_is_run_by_the_next_sync() -> None:
    counter = torch.zeros(3, device=DEVICE)
    lazyxla.sync()
    for number in range(1, 101):  # a thread's last work and the sync were a race once
        run_all([lambda: counter.add_(1)])
        lazyxla.sync()
        assert not lazyxla._C.is_pending(counter), number
    assert counter.tolist() == [100, 100, 100]


def test_a_sync_leaves_what_others_have_recorded() -> None:
    recorded, synced = threading.Event(), threading.Event()
    kept: list[torch.Tensor] = []

    def record() -> None:
        kept.append(torch.ones(7, device=DEVICE) + 1)
        recorded.set()
        assert synced.wait(30)
        assert lazyxla._C.is_pending(kept[0])

    def sync() -> None:
        assert recorded.wait(30)
        lazyxla.sync(wait=True)
        synced.set()

    run_all([record, sync])
    assert kept[0].tolist() == [2] * 7


def test_backward_records_for_the_thread_that_calls_it() -> None:
    def train() -> None:
        trainer = Trainer(2, DEVICE)
        for i in range(4):
            lazyxla._C.trace_keys()
            trainer.step()
            lazyxla.sync()
            # The first step makes the optimizer's state besides.
            assert len(lazyxla._C.traced_keys()) == (1 if i else 5)
            assert not any(lazyxla._C.is_pending(p) for p in trainer.model.parameters())

    run_all([train, train, train])


def test_an_event_is_not_passed_by_the_sync_of_another_thread() -> None:
    x = torch.zeros(4, device=DEVICE)
    lazyxla.sync()
    x.add_(1)
    event = torch.Event(device=DEVICE)
    event.record()
    run_all([lambda: torch.accelerator.synchronize()])
    assert lazyxla._C.is_pending(x)
    event.synchronize()
    assert not lazyxla._C.is_pending(x)
    assert lazyxla._C.is_ready(x)


def test_an_event_of_a_thread_that_has_ended() -> None:
    event, kept = torch.Event(device=DEVICE), []

    def record() -> None:
        kept.append(torch.ones(4, device=DEVICE) + 1)
        event.record()

    run_all([record])
    event.synchronize()
    assert not lazyxla._C.is_pending(kept[0])


@pytest.mark.parametrize("block", [lazyxla.step, lazyxla.compile, lambda: lazyxla.eager_mode(True)])
def test_a_block_that_another_thread_ends(block: Callable[[], Any]) -> None:
    """As the garbage collector may end a generator."""

    def blocks() -> Any:
        with block():
            yield

    generator = blocks()
    next(generator)

    def end() -> None:
        with pytest.raises(RuntimeError, match="ends in another thread than it began in"):
            generator.close()

    try:
        run_all([end])
    finally:
        leave = block()
        leave.__exit__(None, None, None)
    assert not lazyxla._C.in_region()
    assert (torch.ones(2, device=DEVICE) + 1).tolist() == [2, 2]


def test_two_waiters_both_wait() -> None:
    x = torch.randn(900, 900, device=DEVICE)
    lazyxla.sync(wait=True)

    def wait() -> None:
        lazyxla.sync(wait=True)
        assert lazyxla._C.is_ready(x)

    for _ in range(5):
        x.copy_((x @ x).softmax(0))
        lazyxla.sync()
        run_all([wait] * 4)


def test_the_same_loop_has_the_same_keys() -> None:
    """Whatever the timing, collections and other threads."""
    over = threading.Event()

    def noise() -> None:
        x = torch.ones(11, device=DEVICE)
        while not over.is_set():
            x.add_(1)
            x.sum().item()
            time.sleep(0.0005)

    runs: list[list[int]] = []

    def loops() -> None:
        try:
            for number in range(50):
                chance = random.Random(number)
                trainer = Trainer(1, DEVICE)
                lazyxla._C.trace_keys()
                views = []
                for step in range(5):
                    loss = trainer.step()
                    if step == 2:
                        views.append(trainer.model.weight.detach().clone())
                    if chance.random() < 0.5:
                        time.sleep(chance.uniform(0, 0.002))
                    if chance.random() < 0.3:
                        gc.collect()
                    lazyxla.sync(wait=chance.random() < 0.5)
                loss.item()
                runs.append(lazyxla._C.traced_keys())
        finally:
            over.set()

    run_all([loops, noise, noise])
    assert len(runs) == 50
    assert all(keys == runs[0] for keys in runs)


LOOP = """
import torch, lazyxla, random, sys, time
chance = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else time.time_ns())
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 2))
model.to("lazyxla")
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    loss = model(torch.ones(3, 4, device="lazyxla")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(chance.uniform(0, 0.01))
    lazyxla.sync()
"""


def test_two_processes_have_the_same_keys(run_python: Callable[..., Any]) -> None:
    def keys() -> list[str]:
        told = run_python(LOOP, LAZYXLA_LOG="debug").stderr.splitlines()
        return [line for line in told if line.startswith("lazyxla: key ")]

    first = keys()
    assert len(first) >= 2  # the first step makes the optimizer's state
    assert keys() == first


def test_settings_hold_as_they_were_when_recorded() -> None:
    precision = torch.get_float32_matmul_precision()
    seen: list[str] = []

    @torch.library.custom_op("threads::seen", mutates_args=())
    def probe(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @probe.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    @lazyxla.lowering.rule("threads::seen")
    def _lower(b: Any, x: Any) -> Any:
        seen.append(b.settings.matmul_precision)
        return x

    x = torch.ones(3, device=DEVICE)
    try:
        for wanted in ("medium", "high", "highest", "high"):
            torch.set_float32_matmul_precision(wanted)
            x = probe(x)
    finally:
        torch.set_float32_matmul_precision(precision)
    assert x.tolist() == [1, 1, 1]
    assert seen == ["medium", "high", "highest", "high"]


BACKENDS_PRECISION = """
import torch, lazyxla
from lazyxla.lowering.program import Settings

for owner, value, expected in (
    (torch.backends.cuda.matmul, "tf32", "high"),
    (torch.backends.mkldnn.matmul, "bf16", "medium"),
    (torch.backends.cuda.matmul, "ieee", "highest"),
    (torch.backends.cuda.matmul, "none", "highest"),
    (torch.backends, "tf32", "high"),
):
    if owner is torch.backends:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
    owner.fp32_precision = value
    assert Settings.current().matmul_precision == expected, (owner, value)
    x = torch.ones(2, 2, device="lazyxla")
    assert (x @ x).sum().item() == 8
"""


def test_precision_is_also_told_by_the_settings_of_backends(
    run_python: Callable[..., Any],
) -> None:
    """PyTorch's own getter raises while they differ from what it was given last."""
    run_python(BACKENDS_PRECISION)
