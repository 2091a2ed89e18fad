"""The host's part of the decoder's settled training step, in each mode, beside a call of jax.jit.

``modes.py --only host`` runs it. All ways are in one process and take turns. Two figures each:

* of the wall clock, the time of the call (and the sync) without the plugin's execute function;
* processor time of the calling thread and autograd's, the execute function's included, which other
  programs on the machine disturb less.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import decoder_data as data
import torch
from decoder_model import SMALL, Decoder, next_token_loss

import lazyxla
from lazyxla import _C
from lazyxla.dynamo import backend

STEPS = 3  # of a way in a round
BARS = {"captured": 0.8, "torch.compile(model)": 1.5, "lazy": 2.5}  # ms on the wall clock
DEVICE = "lazyxla"


@dataclass
class HostWay:
    call: Callable[[Any], Any]  # with a batch
    wait: Callable[[Any], object]  # for its result
    batches: list[Any]
    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


def training(optimizer: dict[str, Any], compiler: Any = None) -> Callable[..., torch.Tensor]:
    model = Decoder(SMALL)
    model.load_state_dict({name: torch.from_numpy(a) for name, a in data.weights().items()})
    model.to(DEVICE)
    adam = torch.optim.Adam(model.parameters(), lr=data.LEARNING_RATE, **optimizer)
    forward = torch.compile(model, backend=compiler) if compiler else model

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = next_token_loss(forward(tokens), targets)
        loss.backward()
        adam.step()
        adam.zero_grad()
        return loss

    return step


def ways() -> dict[str, HostWay]:
    batches = [
        (torch.from_numpy(x).to(DEVICE), torch.from_numpy(y).to(DEVICE)) for x, y in data.batches()
    ]

    def with_sync(step: Callable[..., torch.Tensor]) -> HostWay:
        def call(batch: Any) -> torch.Tensor:
            loss = step(*batch)
            lazyxla.sync()
            return loss

        return HostWay(call, lambda _: lazyxla.sync(wait=True), batches)

    def region(step: Callable[..., torch.Tensor]) -> HostWay:
        return HostWay(lambda b: step(*b), lambda _: lazyxla.sync(wait=True), batches)

    fused = {"fused": True}
    return {
        "lazy": with_sync(training(fused)),
        "lazy, foreach": with_sync(training({})),
        "region": region(lazyxla.compile(training(fused))),
        "torch.compile(model)": with_sync(training(fused, backend)),
        "captured": region(lazyxla.compile(training(fused), capture=True)),
        "captured, foreach": region(lazyxla.compile(training({}), capture=True)),
        "jax.jit": by_jax(),
    }


def by_jax() -> HostWay:
    import decoder_jax
    import jax

    jitted = jax.jit(decoder_jax.train_step, donate_argnums=0)
    state = decoder_jax.initial_state(dict.fromkeys(data.weights()), None)
    batches = [(jax.device_put(x), jax.device_put(y)) for x, y in data.batches()]

    def call(batch: Any) -> Any:
        nonlocal state
        state, loss = jitted(state, *batch)
        return loss

    return HostWay(call, jax.block_until_ready, batches)


class ProcessorTime:
    """Processor time of the calling thread, and of autograd's, which is asleep meanwhile."""

    def __init__(self) -> None:
        tasks = Path("/proc/self/task").iterdir()
        self._others = [
            task / "schedstat"
            for task in tasks
            if (task / "comm").read_text().startswith("pt_autograd")
        ]
        self._of_others = self._seconds_of_others()
        self._own = time.thread_time()  # last: reading the others takes a while

    def seconds(self) -> float:
        own = time.thread_time() - self._own
        return own + self._seconds_of_others() - self._of_others

    def _seconds_of_others(self) -> float:
        return sum(int(each.read_text().split()[0]) for each in self._others) * 1e-9


def measure(rounds: int) -> dict[str, HostWay]:
    all_ways = ways()
    for way in all_ways.values():
        for batch in way.batches[:4]:
            way.wait(way.call(batch))
    _C.measure_executions(True)
    for _ in range(max(rounds, 10)):
        for way in all_ways.values():
            way.wait(way.call(way.batches[0]))
            for batch in way.batches[:STEPS]:
                plugin, processor = _C.seconds_in_executions(), ProcessorTime()
                begin = time.perf_counter()
                result = way.call(batch)
                wall = time.perf_counter() - begin
                way.processor.append(processor.seconds())
                way.wall.append(wall - (_C.seconds_in_executions() - plugin))
                way.wait(result)
                del result
    _C.measure_executions(False)
    return all_ways


def show(measured: dict[str, HostWay]) -> None:
    """jax.jit's wall clock has its execute function in it, for nobody tells how long that takes."""
    heads = f"{'wall, best':>10} {'median':>8} {'processor':>10} {'median':>8}"
    print(f"\n{'host, ms per step':<21} {heads}")
    for name, way in measured.items():
        best = min(way.wall) * 1e3
        figures = (best, median(way.wall) * 1e3, min(way.processor) * 1e3)
        note = ""
        if (bar := BARS.get(name)) is not None:
            note = f"  bar: at most {bar}, {'met' if best <= bar else 'MISSED'}"
        print(
            f"{name:<21} {figures[0]:>10.2f} {figures[1]:>8.2f} {figures[2]:>10.2f} "
            f"{median(way.processor) * 1e3:>8.2f}{note}"
        )
    print(f"load {os.getloadavg()[0]:.1f}")
