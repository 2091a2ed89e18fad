"""Programs of several processes of which one ends, is late, or launches something else, at random.

    python -m tests.distributed.spanning_faults SEED

is one process of a trial, started by tests/test_spanning.py with the same seed in each. The steps
are a few programs over a mesh of all; in one of them one process misbehaves. All others must be
told, with its number, within the time that processes wait for each other, and go on with what is
their own.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

import lazyxla
from tests.support import DEVICE

TIMEOUT = timedelta(seconds=5)
GRACE = 15.0
"""Seconds that a loaded machine may take besides."""

Step = Callable[[torch.Tensor], torch.Tensor]
STEPS: list[Step] = [
    lambda x: (x * 2).sum(),
    lambda x: x.flip(0) + 1,
    lambda x: (x @ x.t()).relu(),
    lambda x: x.cumsum(0).mean(1),
]


def main(seed: int) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    draw = random.Random(seed)
    kind = draw.choice(["ends", "is late", "computes something else", "launches one more"])
    culprit, when = draw.randrange(size), draw.randrange(1, 6)
    order = [draw.randrange(len(STEPS)) for _ in range(8)]
    print(kind, culprit, when, order, file=sys.stderr)
    dist.init_process_group("lazyxla", timeout=TIMEOUT)
    mesh = lazyxla.Mesh((size, 2), ("data", "model"))
    x = lazyxla.shard(torch.arange(48.0).reshape(8, 6), mesh, ("data", "model"))
    begin = time.monotonic()
    try:
        for number, step in enumerate(order):
            if (number, rank) == (when, culprit):
                if kind == "ends":
                    os._exit(0)
                if kind == "is late":
                    time.sleep(2.5 * TIMEOUT.total_seconds())
                if kind == "launches one more":
                    (x * 3).sum().item()
                if kind == "computes something else":
                    step = (step + 1) % len(STEPS)
            begin = time.monotonic()
            STEPS[step](x).cpu()
    except RuntimeError as error:
        took, text = time.monotonic() - begin, str(error)
    else:
        raise AssertionError("nobody was told")
    assert number >= when, text
    if kind == "is late" and rank == culprit:
        assert "process" in text, text  # the others, which have ended meanwhile
        os._exit(0)
    assert f"process {culprit}: " in text, text
    assert took < TIMEOUT.total_seconds() + GRACE, (took, text)
    if kind in ("computes something else", "launches one more"):
        assert "launch different programs" in text, text
        assert f"{os.path.basename(__file__)}:" in text, text
    elif rank != culprit:
        assert f"process {culprit}: not there" in text, text
    assert (torch.ones(3).to(DEVICE) + 1).sum().item() == 6  # what is one's own goes on
    os._exit(0)  # the group cannot be taken down together


if __name__ == "__main__":
    main(int(sys.argv[1]))
