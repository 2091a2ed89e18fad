"""Measures on this machine what programs for the CPU leave to PyTorch's kernels::

    python -m lazyxla.kernel_measurements

Each kind of work (``lowering/cpu/kernel_limits.py``) is run at growing sizes by what XLA's compiler
makes of it and by calls of the kernels, in turns; matmuls, convolutions, attention and pooling with
their gradients. From the size on at which the calls take less time, programs have them. The table
is kept in the directory of the on-disk caches, for this processor, this number of threads and these
versions; every process that starts afterwards reads it. The machine should have nothing else to do
meanwhile: about half a minute.
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

_HOPELESS = 2
"""A kind whose first two sizes take calls so many times as long as XLA's form is not measured
further."""

_ROUNDS, _RUNS = 4, 3


DTYPES = (torch.float32, torch.bfloat16)
_WIDE = (torch.float64, torch.complex64, torch.complex128)


@dataclass(frozen=True)
class Work:
    """An operation on operands of some shapes, in some dtypes, and its size as its kind counts it.
    It is run `times` times, on operands of its own each time, and with its gradients if
    `gradients`."""

    kind: str
    size: int
    shapes: Sequence[Sequence[int]]
    operation: Callable[..., torch.Tensor]
    times: int = 1
    gradients: bool = True
    dtypes: Sequence[torch.dtype] = DTYPES

    def operands(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """Those of each time."""
        return [
            [torch.randn(*shape, dtype=dtype).to(runtime.BACKEND) for shape in self.shapes]
            for _ in range(self.times)
        ]

    def run(self, operands: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """The results, and the gradients."""
        results = []
        for given in operands:
            inputs = [x.requires_grad_(self.gradients) for x in given]
            result = self.operation(*inputs)
            results.append(result)
            if self.gradients:
                results += torch.autograd.grad(result, inputs, torch.ones_like(result))
        return results


def _matmul(rows: int, inputs: int, outputs: int, *dtypes: torch.dtype) -> Work:
    shapes = [(rows, inputs), (outputs, inputs)]
    size = 2 * rows * inputs * outputs
    return Work("matmul", size, shapes, F.linear, dtypes=dtypes or DTYPES)


def _few_rows(inputs: int, outputs: int) -> Work:
    shapes = [(2, inputs), (outputs, inputs), (outputs,)]
    size = 4 * inputs * outputs
    return Work("matmul of few rows", size, shapes, F.linear, gradients=False)


def _convolution(features: int, positions: int) -> Work:
    shapes = [(2, features, positions, positions), (features, features, 3, 3)]
    size = 2 * math.prod(shapes[0]) * math.prod(shapes[1][1:])
    return Work("convolution", size, shapes, functools.partial(F.conv2d, padding=1))


def _attention(samples: int, heads: int, keys: int) -> Work:
    shapes = [(samples, heads, keys, 64)] * 3
    return Work("attention", keys, shapes, F.scaled_dot_product_attention)


def _volumes(size: int) -> Work:
    shapes = [(1, 4, size, size, size), (8, 4, 3, 3, 3)]
    work = 2 * shapes[1][0] * math.prod(shapes[0]) * 27
    return Work("convolution of volumes", work, shapes, functools.partial(F.conv3d, padding=1))


def _few_channels(size: int) -> Work:
    shapes = [(4, 3, size, size), (4, 3, 3, 3)]
    work = 2 * math.prod(shapes[0]) * 4 * 9
    operation = functools.partial(F.conv2d, padding=1)
    return Work("convolution of few channels", work, shapes, operation, gradients=False)


def _max_pooling(size: int) -> Work:
    operation = functools.partial(F.max_pool2d, kernel_size=3, stride=2)
    return Work("max pooling", 64 * size**2, [(1, 64, size, size)], operation)


def _sampling(size: int) -> Work:
    def operation(image: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(image, grid.tanh(), align_corners=False)

    shapes = [(2, 16, size, size), (2, size, size, 2)]
    return Work("sampling", math.prod(shapes[0]), shapes, operation)


def _elements(
    kind: str, operation: Callable[..., torch.Tensor], operands: int = 1, rows: bool = False
) -> Iterator[Work]:
    """At several sizes: of vectors, or of rows of 256 elements."""
    for size in (1 << 10, 1 << 12, 1 << 14, 1 << 16):
        shape = (size // 256, 256) if rows else (size,)
        yield Work(kind, size, [shape] * operands, operation, times=8, gradients=False)


WORK = (
    *(_matmul(*sizes) for sizes in ((64, 192, 256), (64, 256, 384), (128, 256, 512))),
    *(_matmul(*sizes) for sizes in ((256, 512, 1024), (512, 768, 3072))),
    *(_matmul(*sizes, *_WIDE) for sizes in ((32, 64, 64), (64, 192, 256), (128, 256, 512))),
    *(_few_rows(*sizes) for sizes in ((256, 1024), (768, 1024), (1024, 2048), (2048, 4096))),
    *(_convolution(*sizes) for sizes in ((16, 28), (32, 28), (64, 28), (64, 56), (128, 56))),
    *(_attention(*sizes) for sizes in ((64, 12, 64), (16, 12, 128), (4, 12, 256), (1, 12, 512))),
    _attention(1, 4, 1024),
    *(_few_channels(size) for size in (14, 28, 56, 112)),
    *(_volumes(size) for size in (6, 8, 12, 16)),
    *(_max_pooling(size) for size in (7, 14, 28, 56)),
    *(_sampling(size) for size in (4, 8, 16, 32)),
    *_elements("function", torch.sin),
    *_elements("order statistic", lambda x: x.kthvalue(8).values, rows=True),
    *_elements("running result", lambda x: x.cumsum(1), rows=True),
    *_elements("sort", lambda x: x.double().argsort(), rows=True),
    *_elements("topk", lambda x: x.topk(4).values, rows=True),
    *_elements("vector product", torch.dot, operands=2),
)
"""Each kind from small to large."""


def measure(
    work: Sequence[Work] = WORK,
    report: Callable[[str], None] = lambda line: None,
) -> Limits:
    """The limits of this machine, see ``kernel_limits``, infinite where a call is never faster;
    `report` gets a line for each size."""
    limits: dict[str, float] = {}
    for kind, dtype in dict.fromkeys((w.kind, dtype) for w in work for dtype in w.dtypes):
        name = kernel_limits.entry(kind, dtype)
        if name in limits:
            continue  # for all dtypes
        shares: dict[int, float] = {}
        for w in (w for w in work if w.kind == kind and dtype in w.dtypes):
            if len(shares) > 1 and min(shares.values()) >= _HOPELESS:
                break
            xla, called = seconds(w, dtype)
            shares[w.size] = called / xla
            report(
                f"{name:34} size {w.size:13,}  XLA {1e3 * xla:8.2f} ms  "
                f"called {1e3 * called:8.2f} ms  ratio {called / xla:.2f}"
            )
        limits[name] = limit(shares)
    return limits


def limit(shares: dict[int, float]) -> float:
    """The least size at which a call is faster, and from which on it is faster in the mean and
    never slower by as much; infinite if there is none. `shares` is the time of a call divided by
    XLA's."""
    sizes = sorted(shares)
    for i, size in enumerate(sizes):
        later = [shares[s] for s in sizes[i:]]
        faster = max(later[0], statistics.geometric_mean(later)) <= _FASTER
        if faster and max(later) <= 1 / _FASTER:
            return size
    return math.inf


def seconds(work: Work, dtype: torch.dtype) -> tuple[float, float]:
    """What XLA's form of some work takes, and the calls, the best of several runs each."""
    operands = work.operands(dtype)
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
        print(f"{name}: never" if math.isinf(least) else f"{name}: from {least:,.0f}")
    print(f"kept in {kernel_table.path()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
