"""Processes that differ where they do not talk to each other."""

from __future__ import annotations

import contextlib
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lazyxla
from tests.distributed.cases import case, ranked
from tests.distributed.training import batch, make_model, train_step

DDP = nn.parallel.DistributedDataParallel
Extra = Callable[[nn.Module, Tensor, int], Any]


def train(device: str, during: Extra, between: Extra, model: nn.Module | None = None) -> Any:
    """Six steps; `during` gets the loss before, `between` after the step."""
    torch.manual_seed(0)
    model = DDP((model or make_model()).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, extras = [], []
    for step in range(6):
        x, labels = batch(device, step)
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        extras.append(during(model, loss, step))
        loss.backward()
        optimizer.step()
        extras.append(between(model, loss, step))
        losses.append(loss.detach())
    return losses, list(model.parameters()), extras


def nothing(model: nn.Module, loss: Tensor, step: int) -> None:
    pass


def sync(model: nn.Module, loss: Tensor, step: int) -> None:
    if loss.device.type != "cpu":
        lazyxla.sync()


def on(rank: int, do: Extra, otherwise: Extra = sync) -> Extra:
    return do if dist.get_rank() == rank else otherwise


@case
def one_logs(device: str) -> Any:
    """In the middle of steps as well as after them."""

    def log(model: nn.Module, loss: Tensor, step: int) -> Tensor:
        return torch.tensor(loss.item())

    return train(device, on(0, log, nothing), nothing), train(device, nothing, on(1, log))


@case
def one_never_syncs(device: str) -> Any:
    """One runs each step, the other all six at once."""
    return train(device, nothing, on(0, sync, nothing))


@case
def one_evaluates(device: str) -> Any:
    """On its own data, of several sizes, with an operator of the host among the others."""

    def evaluate(model: Any, loss: Tensor, step: int) -> Tensor:
        model.eval()
        with torch.no_grad():
            x = torch.linspace(-1, 1, 6 * (step % 3 + 1)).reshape(-1, 6).to(device)
            result = model.module(x)
            found = result[result[:, 0] > 0].sum()
        model.train()
        return found

    return train(device, nothing, on(0, evaluate))


@case
def one_writes_a_checkpoint(device: str) -> Any:
    where = Path(tempfile.mkdtemp()) / "model.pt"

    def write(model: Any, loss: Tensor, step: int) -> Any:
        torch.save(model.module.state_dict(), where)
        return list(torch.load(where, map_location="cpu").values())

    return train(device, nothing, on(1, write))


class Branching(nn.Module):
    """The same parameters take part in all processes, in other computations."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if dist.get_rank() == 0:
            return y
        for _ in range(dist.get_rank() + 1):
            y = y + torch.sort(y.sin(), dim=0).values / 3
        return y * 1.5 if y.sum() > 0 else y


@case
def other_branches(device: str) -> Any:
    return train(device, nothing, sync, Branching())


@case
def smaller_last_batches(device: str) -> Any:
    model = DDP(make_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(8):
        x, labels = batch(device, step)
        if step % 4 == 3:
            x, labels = x[dist.get_rank() :], labels[dist.get_rank() :]
        losses.append(train_step(model, optimizer, x, labels))
    return losses, list(model.parameters())


@contextlib.contextmanager
def eager(device: str) -> Iterator[None]:
    lazyxla.eager_mode(device != "cpu")
    try:
        yield
    finally:
        lazyxla.eager_mode(False)


@case
def other_modes(device: str) -> Any:
    """One is eager, one records, the third waits, and then runs."""
    if dist.get_rank() == 0:
        with eager(device):
            return train(device, nothing, nothing)

    def wait(model: nn.Module, loss: Tensor, step: int) -> None:
        time.sleep(0.05 * (step % 3))
        sync(model, loss, step)

    return train(device, nothing, on(2, wait))


@torch.library.custom_op("lazyxla_tests::fails", mutates_args=())
def fails(x: Tensor) -> Tensor:
    raise RuntimeError("on purpose")


@fails.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@case
def one_meets_errors(device: str) -> Any:
    """Of its own, which it catches: calls that are refused, and a program that fails."""

    def fail(model: nn.Module, loss: Tensor, step: int) -> None:
        with pytest.raises(RuntimeError):
            loss.new_zeros(3) + loss.new_zeros(4)
        sync(model, loss, step)  # what is recorded with what fails fails with it
        with pytest.raises(RuntimeError, match="on purpose"):
            (fails(torch.ones(3).to(device)) * 2).cpu()
        with pytest.raises(RuntimeError):
            torch.linalg.cholesky(-torch.eye(3).to(device)).cpu()

    return train(device, nothing, on(0, fail))


@case
def one_computes_in_a_thread(device: str) -> Any:
    """Beside training, and without talking to others."""
    if dist.get_rank() > 0:
        return train(device, nothing, sync)
    results = []

    def compute() -> None:
        x = torch.linspace(-1, 1, 12).to(device)
        for _ in range(30):
            x = (x * 1.1).sin()
            results.append(x.sum().item())

    thread = threading.Thread(target=compute)
    thread.start()
    trained = train(device, nothing, sync)
    thread.join()
    return trained, torch.tensor(results)


def objects(x: Tensor) -> Any:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, dist.get_rank())
    return x + sum(found)


def on_the_host(x: Tensor) -> Any:
    ours = torch.full((3,), float(dist.get_rank()))
    dist.all_reduce(ours)
    return x + ours.to(x.device)


def on_the_host_for_inference(x: Tensor) -> Any:
    with torch.inference_mode():
        flag = torch.full((1,), dist.get_rank())
        dist.broadcast(flag, src=1)
    return x + flag.item()


def on_the_host_later(x: Tensor) -> Any:
    ours = torch.full((3,), float(dist.get_rank()))
    work = dist.all_reduce(ours, async_op=True)
    y = on_the_device(x)
    assert work is not None
    work.wait()
    return y + ours.to(x.device)


def on_the_device(x: Tensor) -> Any:
    y = x * (dist.get_rank() + 1)
    dist.all_reduce(y)
    return y / 4


def barrier(x: Tensor) -> Any:
    dist.barrier()
    return x * 2


def of_a_new_group(x: Tensor) -> Any:
    backend = "gloo" if x.device.type == "cpu" else "lazyxla"
    group = dist.new_group(backend=backend)
    y = x.clone()
    dist.all_reduce(y, group=group)
    return y / 2


MEETINGS: list[Callable[[Tensor], Any]] = [
    *(objects, on_the_host, on_the_host_for_inference, on_the_host_later, barrier),
    *(on_the_device, on_the_device, of_a_new_group),
]


@case
def others_wait_on_the_host(device: str) -> Any:
    """Each process reads what and when it likes, between meetings on the device and off it."""
    meetings, reads = random.Random(0), random.Random(dist.get_rank())
    x = torch.ones(3, device=device)
    for _ in range(60):
        x = meetings.choice(MEETINGS)(x) % 100
        what = reads.randrange(4)
        if what == 0:
            x.sum().item()
        elif what == 1 and device != "cpu":
            lazyxla.sync(wait=reads.random() < 0.5)
    return x


def read(results: list[Tensor]) -> Any:
    return results[0].cpu()


def compute_with(results: list[Tensor]) -> Any:
    return (results[1] * 2 + results[2][0]).sum().item()


def write_to_a_part(results: list[Tensor]) -> Any:
    results[1][1:2].zero_()


@case
def threads_use_what_others_recorded(device: str) -> Any:
    """Each process's threads take other results of the same collectives: none may run twice."""
    choose, found, threads = random.Random(dist.get_rank()), [], []
    total = torch.zeros(4, device=device)
    for turn in range(24):
        x = ranked(device, 4) + turn
        total = total / 2 + x
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_reduce(total)
        dist.all_gather(parts, x + total)
        results = [total, parts[0], torch.stack(parts)]
        use = choose.choice([read, compute_with, write_to_a_part])

        def run(turn: int, use: Callable[[list[Tensor]], Any], results: list[Tensor]) -> None:
            found.append((turn, use(results)))

        thread = threading.Thread(target=run, args=(turn, use, results))
        thread.start()
        if use is write_to_a_part or choose.random() < 0.5:
            thread.join()
        else:
            threads.append(thread)
        total = results[1] + results[2].sum(0)
    for thread in threads:
        thread.join()
    return total, [value for _, value in sorted(found, key=lambda each: each[0])]


@case
def a_region_keeps_its_collectives(device: str) -> Any:
    """Another thread cannot use what depends on one before the region has ended."""

    def step(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y)
        if device != "cpu":
            for use in (y.cpu, lambda: y + 1, y[1:].zero_):
                with ThreadPoolExecutor(1) as pool:
                    error = pool.submit(use).exception()
                assert "once the region has ended" in str(error)
        return y + 1

    run = step if device == "cpu" else lazyxla.compile(step)
    x = ranked(device, 4)
    for _ in range(3):
        x = run(x)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(x.cpu).result()
