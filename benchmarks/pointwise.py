"""2,000 dependent pointwise operators on a 16x16 tensor: what the host pays per operator."""

from __future__ import annotations

import time

from common import arguments, report

args = arguments("lazyxla", "eager", "torch_xla")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

OPERATORS = 2000
REPEATS = 30


def chain(x: Tensor) -> Tensor:
    for _ in range(OPERATORS // 4):
        x = x + 1.0
        x = x * 0.5
        x = x - 0.25
        x = -x
    return x


if args.side == "lazyxla":
    import lazyxla

    device = "lazyxla"
    sync, wait = lazyxla.sync, lambda: lazyxla.sync(wait=True)
elif args.side == "torch_xla":
    import torch_xla

    device = torch_xla.device()
    sync, wait = torch_xla.sync, lambda: torch_xla.sync(wait=True)
else:
    device = "cpu"
    sync = wait = lambda: None

record, flush, total = [], [], []
x = torch.ones(16, 16).to(device)
for _ in range(REPEATS):
    wait()
    begin = time.perf_counter()
    y = chain(x)
    recorded = time.perf_counter()
    sync()
    flushed = time.perf_counter()
    wait()
    total.append(time.perf_counter() - begin)
    record.append(recorded - begin)
    flush.append(flushed - recorded)
    del y

us = 1e6 / OPERATORS
report(record_us=min(record) * us, flush_us=min(flush) * us, total_us=min(total) * us)
