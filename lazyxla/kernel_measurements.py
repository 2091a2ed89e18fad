"""Measures on this machine what programs for the CPU leave to PyTorch's kernels::

    python -m lazyxla.kernel_measurements

Each kind of work (``lowering/cpu/kernel_limits.py``) is run at growing sizes, with its gradients,
by what XLA's compiler makes of it and by calls of the kernels, in turns. From the size on at which
the calls take less time, programs have them. The table is kept in the directory of the on-disk
caches, for this processor, this number of threads and these versions; every process that starts
afterwards reads it. The machine should have nothing else to do meanwhile: about half a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from lazyxla import runtime
from lazyxla.cache import kernel_table
from lazyxla.config import settings
from lazyxla.lowering.cpu import kernel_limits
from lazyxla.lowering.cpu.kernel_limits import Limits

_FASTER = 0.95
"""A call that takes no more than this part of the time of XLA's form is faster."""

_ROUNDS, _RUNS = 4, 3


@dataclass(frozen=True)
class Work:
    """An operation on operands of some shapes, and its size as its kind counts it."""

    kind: str
    size: int
    shapes: Sequence[Sequence[int]]
    operation: Callable[..., torch.Tensor]

    def run(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The result and the gradients."""
        result = self.operation(*operands)
        return [result, *torch.autograd.grad(result, operands, torch.ones_like(result))]


def _matmul(rows: int, inputs: int, outputs: int) -> Work:
    shapes = [(rows, inputs), (outputs, inputs)]
    return Work("matmul", 2 * rows * inputs * outputs, shapes, F.linear)


def _convolution(features: int, positions: int) -> Work:
    shapes = [(2, features, positions, positions), (features, features, 3, 3)]
    size = 2 * math.prod(shapes[0]) * math.prod(shapes[1][1:])
    return Work("convolution", size, shapes, functools.partial(F.conv2d, padding=1))


def _attention(samples: int, heads: int, keys: int) -> Work:
    shapes = [(samples, heads, keys, 64)] * 3
    return Work("attention", keys, shapes, F.scaled_dot_product_attention)


WORK = (
    *(_matmul(*sizes) for sizes in ((64, 192, 256), (64, 256, 384), (128, 256, 512))),
    *(_matmul(*sizes) for sizes in ((256, 512, 1024), (512, 768, 3072))),
    *(_convolution(*sizes) for sizes in ((16, 28), (32, 28), (64, 28), (64, 56), (128, 56))),
    *(_attention(*sizes) for sizes in ((64, 12, 64), (16, 12, 128), (4, 12, 256), (1, 12, 512))),
    _attention(1, 4, 1024),
)
"""Each kind from small to large."""

DTYPES = (torch.float32, torch.bfloat16)


def measure(
    work: Sequence[Work] = WORK,
    dtypes: Sequence[torch.dtype] = DTYPES,
    report: Callable[[str], None] = lambda line: None,
) -> Limits:
    """The limits of this machine, see ``kernel_limits``; `report` gets a line for each size."""
    limits: dict[str, float] = {}
    for dtype in dtypes:
        for kind in dict.fromkeys(w.kind for w in work):
            name = kernel_limits.entry(kind, dtype)
            shares = {}
            for w in (w for w in work if w.kind == kind):
                xla, called = seconds(w, dtype)
                shares[w.size] = called / xla
                report(
                    f"{name:22} size {w.size:13,}  XLA {1e3 * xla:8.2f} ms  "
                    f"called {1e3 * called:8.2f} ms  ratio {called / xla:.2f}"
                )
            least = limit(shares)
            if least is not None:
                limits[name] = least
    return limits


def limit(shares: dict[int, float]) -> int | None:
    """The least size at which a call is faster, and from which on it is faster in the mean and
    never slower by as much; `shares` is the time of a call divided by XLA's."""
    sizes = sorted(shares)
    for i, size in enumerate(sizes):
        later = [shares[s] for s in sizes[i:]]
        faster = max(later[0], statistics.geometric_mean(later)) <= _FASTER
        if faster and max(later) <= 1 / _FASTER:
            return size
    return None


def seconds(work: Work, dtype: torch.dtype) -> tuple[float, float]:
    """What XLA's form of some work takes, and the calls, the best of several runs each."""
    operands = [
        torch.randn(*shape, dtype=dtype).to(runtime.BACKEND).requires_grad_()
        for shape in work.shapes
    ]
    name = kernel_limits.entry(work.kind, dtype)

    def run(marks: int) -> None:
        # Ones in different numbers make two programs of it.
        results = [*work.run(operands), torch.ones(marks, device=runtime.BACKEND)]
        runtime.sync(wait=True)
        del results

    forms: tuple[tuple[int, Limits], ...] = ((1, {}), (2, {name: 0}))
    best = [math.inf, math.inf]
    for marks, limits in forms:
        with kernel_limits.using(limits):
            run(marks)
            run(marks)
    for _ in range(_ROUNDS):
        for i, (marks, _limits) in enumerate(forms):
            for _ in range(_RUNS):
                start = time.perf_counter()
                run(marks)
                best[i] = min(best[i], time.perf_counter() - start)
    return best[0], best[1]


@contextlib.contextmanager
def _compiling_all() -> Iterator[None]:
    """No program comes from the disk, none is run by the host before it is compiled, and nobody is
    warned that each size is a program."""
    changes = {"cache_size": 0, "host_programs": False, "log_level": "error"}
    before = {name: getattr(settings, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(settings, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lazyxla.kernel_measurements",
        description="Measures from which size on PyTorch's kernels are faster than XLA's programs "
        "on this machine, and keeps that for the processes that start afterwards.",
    )
    parser.parse_args(arguments)
    if runtime.platform() != "cpu":
        print("kernels are called in programs for the CPU only: LAZYXLA_PLATFORM=cpu")
        return 2
    with _compiling_all():
        limits = measure(report=functools.partial(print, flush=True))
    kernel_table.keep(limits)
    for name, least in limits.items():
        print(f"{name} from {least:,.0f}")
    print(f"kept in {kernel_table.path()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
