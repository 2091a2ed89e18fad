"""Processes that die, come late, or call other collectives.

tests/test_distributed_faults.py starts this:

    python -m tests.distributed.faults 50 0     so many trials, and the seed; and which
                                                comparison (`always`), if not one at random

In each trial two or three processes run the same steps of a few collectives, until one of them does
something else. All that live on must be told who, within the group's timeout, and end. Children
are forked from one process that has imported everything, which is quicker than new ones. Prints
what went wrong, as JSON: a list of {trial, problem}.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lazyxla
from tests.exits import import_everything

TIMEOUT = 6.0  # of the groups, in seconds
LATE = TIMEOUT + 5  # how late one comes
SECONDS = 90  # that a trial may take
AT_ONCE = 5  # trials, which mostly wait
DEVICE = "lazyxla"


def reduce(size: int) -> Any:
    x = torch.ones(size, device=DEVICE)
    dist.all_reduce(x)
    return x


def maximum(size: int) -> Any:
    x = torch.ones(size, device=DEVICE)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


def counts(size: int) -> Any:
    x = torch.ones(size, device=DEVICE, dtype=torch.int32)
    dist.all_reduce(x)
    return x


def from_last(size: int) -> Any:
    x = torch.ones(size, device=DEVICE)
    dist.broadcast(x, dist.get_world_size() - 1)
    return x


def gather(size: int) -> Any:
    whole = torch.empty(dist.get_world_size() * size, device=DEVICE)
    dist.all_gather_into_tensor(whole, torch.ones(size, device=DEVICE))
    return whole


def scatter(size: int) -> Any:
    part = torch.empty(size, device=DEVICE)
    dist.reduce_scatter_tensor(part, torch.ones(dist.get_world_size() * size, device=DEVICE))
    return part


def exchange(size: int) -> Any:
    rows = torch.empty(dist.get_world_size(), size, device=DEVICE)
    dist.all_to_all_single(rows, torch.ones(dist.get_world_size(), size, device=DEVICE))
    return rows


def passed(size: int) -> Any:
    """To the next one, from the one before."""
    rank, count = dist.get_rank(), dist.get_world_size()
    x, y = torch.ones(size, device=DEVICE), torch.empty(size, device=DEVICE)
    sent = dist.isend(x, (rank + 1) % count)
    dist.recv(y, (rank - 1) % count)
    sent.wait()
    return y


COLLECTIVES = (reduce, maximum, counts, from_last, gather, scatter, exchange, passed)
Step = list[tuple[Callable[[int], Any], int]]


@dataclass
class Trial:
    """What the processes do. The one that differs does so in one call of one step."""

    processes: int
    step: Step
    steps: int
    fault: str
    culprit: int
    when: tuple[int, int]
    eager: bool
    other: tuple[Callable[[int], Any], int]
    reads: bool  # the results of each step, or only waits
    comparison: str

    @classmethod
    def draw(cls, rng: random.Random) -> Trial:
        count = rng.randint(2, 3)
        calls = range(rng.randint(1, 4))
        step = [(rng.choice(COLLECTIVES), rng.choice((2, 3, 1000))) for _ in calls]
        steps = rng.randint(1, 5)
        when = rng.randrange(steps), rng.randrange(len(step))
        collective, size = step[when[1]]
        others = [(c, size) for c in COLLECTIVES if c is not collective]
        return cls(
            processes=count,
            step=step,
            steps=steps,
            fault=rng.choice(FAULTS),
            culprit=rng.randrange(count),
            when=when,
            eager=rng.random() < 0.3,
            other=rng.choice([*others, (collective, size + 1), (collective, 7 * size)]),
            reads=rng.random() < 0.5,
            comparison=rng.choice(("first", "always")),
        )


FAULTS = ("killed", "ended", "raised", "late", "other", "additional", "left out")


class _Own(Exception):
    """An error of the user's."""


def run(trial: Trial, rank: int) -> None:
    """The steps of one process."""
    for number in range(trial.steps):
        results = []
        for position, (collective, size) in enumerate(trial.step):
            if rank == trial.culprit and (number, position) == trial.when:
                if trial.fault == "killed":
                    lazyxla.sync()
                    os.kill(os.getpid(), signal.SIGKILL)
                elif trial.fault == "ended":
                    os._exit(0)
                elif trial.fault == "raised":
                    raise _Own
                elif trial.fault == "late":
                    time.sleep(LATE)
                elif trial.fault in ("other", "additional"):
                    other, other_size = trial.other
                    results.append(other(other_size))
                if trial.fault in ("other", "left out"):
                    continue
            results.append(collective(size))
        if trial.reads:
            for result in results:
                result.tolist()
        lazyxla.sync(wait=True)


def child(trial: Trial, rank: int, meeting_point: str) -> None:
    lazyxla.settings.compare_collectives = trial.comparison
    dist.init_process_group(
        "lazyxla",
        init_method=f"file://{meeting_point}",
        rank=rank,
        world_size=trial.processes,
        timeout=timedelta(seconds=TIMEOUT),
    )
    lazyxla.eager_mode(trial.eager)
    run(trial, rank)
    # As every job ends: whoever waits for what this one left out is met here at the latest.
    dist.barrier()
    print("nothing was noticed")


class Running:
    """A trial whose processes have been started."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self._directory = Path(tempfile.mkdtemp(prefix="lazyxla-faults-"))
        self._pids = [self._start(rank) for rank in range(trial.processes)]

    def _start(self, rank: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        told = os.open(self._directory / str(rank), os.O_WRONLY | os.O_CREAT)
        os.dup2(told, 1)
        os.dup2(told, 2)
        try:
            child(self.trial, rank, str(self._directory / "meet"))
        except _Own:
            pass
        except BaseException as error:
            print(f"told: {error}")
        sys.stdout.flush()
        os._exit(0)

    def problem(self) -> str:
        """What went wrong, once all processes have ended; empty if nothing did."""
        codes = _wait(self._pids)
        texts = [(self._directory / str(rank)).read_text() for rank in range(len(codes))]
        found = (_judge(self.trial, rank, *each) for rank, each in enumerate(zip(codes, texts)))
        return "; ".join(filter(None, found))


def _wait(pids: list[int]) -> list[int | None]:
    """The exit codes; None for those that had to be killed."""
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + SECONDS
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    codes[pid] = None
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


def _judge(trial: Trial, rank: int, code: int | None, text: str) -> str:
    gone = trial.fault in ("killed", "ended", "raised")
    if rank == trial.culprit and gone:
        return "" if code in (0, -signal.SIGKILL) else f"process {rank} ended with {code}: {text}"
    if code is None:
        return f"process {rank} hangs: {text}"
    if code != 0 or "told: " not in text:
        return f"process {rank} ended with {code}: {text}"
    told = text.partition("told: ")[2]
    if not re.search(r"processes of a group call different collectives|a collective failed", told):
        return f"process {rank} is not told what failed: {told}"
    # Who is late may be told by those who waited that they gave up.
    if rank != trial.culprit and not re.search(rf"process(es)? [\d, ]*\b{trial.culprit}\b", told):
        return f"process {rank} is not told of process {trial.culprit}: {told}"
    if not re.search(r"faults\.py:\d+", told):
        return f"process {rank} is not told a line: {told}"
    return ""


def main(count: int, seed: int, comparison: str | None = None) -> None:
    import_everything()
    problems = []
    for first in range(0, count, AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, count))
        trials = [Trial.draw(random.Random(f"{seed} {number}")) for number in numbers]
        for trial in trials:
            trial.comparison = comparison or trial.comparison
        for number, running in zip(numbers, [Running(trial) for trial in trials]):
            if problem := running.problem():
                problems.append({"trial": f"{number}: {running.trial}", "problem": problem})
                print(problems[-1], file=sys.stderr, flush=True)
    print(json.dumps(problems))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
