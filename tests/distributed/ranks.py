"""One of several processes: a script for tests/test_distributed.py.

Usage: ranks.py RANK SIZE FILE NAME...; FILE, a new one, is where the processes meet. Runs each case
on the device and on the CPU, where PyTorch's own Gloo group serves it, and prints one JSON object:
by case, what differs (empty if nothing does) and what the device's run counted.
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lazyxla
from tests.distributed.all_cases import CASES
from tests.distributed.training import STEPS


def compare(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs):
            compare(a, b)
    elif isinstance(theirs, Tensor):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach())
    else:
        assert ours == theirs


def run(name: str) -> dict[str, Any]:
    print(name, file=sys.stderr, flush=True)
    STEPS.clear()
    lazyxla.sync(wait=True)
    before = lazyxla.counters()
    try:
        ours = CASES[name]("lazyxla")
        steps = copy.copy(STEPS)
        lazyxla.sync(wait=True)
        after = lazyxla.counters()
        compare(ours, CASES[name]("cpu"))
        problem = ""
    except Exception:
        problem, after, steps = traceback.format_exc(), before, []
    counted = {key: after[key] - before[key] for key in after}
    return {"problem": problem, "counted": counted, "steps": steps}


def main(rank: int, size: int, meeting_point: str, names: list[str]) -> None:
    dist.init_process_group(
        "cpu:gloo,lazyxla:lazyxla",
        init_method=f"file://{meeting_point}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=180),
    )
    results = {name: run(name) for name in names or CASES}
    print(json.dumps(results), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
