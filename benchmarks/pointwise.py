"""2,000 dependent pointwise operators on 16x16 tensors: what the host pays per operator.

Half of them take a second tensor or none, half a Python number, which PyTorch wraps into a tensor
of its own first. The two halves are measured apart, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from common import arguments, report

args = arguments("lazyxla", "eager", "torch_xla")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

OPERATORS = 2000
REPEATS = 30


def tensors(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(OPERATORS // 4):
        x = x + y
        x = x * y
        x = x - y
        x = -x
    return x


def numbers(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(OPERATORS // 4):
        x = x + 1.0
        x = x * 0.5
        x = x - 0.25
        x = x / 1.5
    return x


def mixed(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(OPERATORS // 4):
        x = x + y
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

US = 1e6 / OPERATORS


def measure(chain: Callable[[Tensor, Tensor], Tensor]) -> tuple[float, float, float]:
    """Best times of recording, flushing, and all until the result is there; in us per operator."""
    record, flush, total = [], [], []
    x, y = torch.ones(16, 16).to(device), torch.ones(16, 16).to(device)
    for _ in range(REPEATS):
        wait()
        begin = time.perf_counter()
        result = chain(x, y)
        recorded = time.perf_counter()
        sync()
        flushed = time.perf_counter()
        wait()
        total.append(time.perf_counter() - begin)
        record.append(recorded - begin)
        flush.append(flushed - recorded)
        del result
    return min(record) * US, min(flush) * US, min(total) * US


record_us, flush_us, total_us = measure(mixed)
report(
    record_us=record_us,
    flush_us=flush_us,
    total_us=total_us,
    record_tensors_us=measure(tensors)[0],
    record_numbers_us=measure(numbers)[0],
)
