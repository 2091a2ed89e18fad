"""Times operators one by one, forward and with their gradients, beside PyTorch's kernels.

A network's time hides an operator that is slow; here it is a line of its own, the slowest first:

    python benchmarks/operators.py                        # all of operator_cases.py, on the CPU
    python benchmarks/operators.py --only sort,topk_10    # some
    python benchmarks/operators.py --dtype bfloat16       # floats of another dtype
    python benchmarks/operators.py --topology v5e:1x1     # what a TPU's compiler estimates; no TPU

On the CPU both sides run in one process, in turns. For a TPU the peer is the memory's bandwidth:
the time in which inputs and results could be read and written once.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from operator_cases import CASES, Case  # noqa: E402
from torch import Tensor  # noqa: E402

import lazyxla  # noqa: E402

SECONDS, ROUNDS = 0.4, 3  # that a side is run for in each round

Run = Callable[[], object]


class Line(NamedTuple):
    """A case's times of both sides, in milliseconds, forward and with gradients."""

    name: str
    ours: list[float]
    theirs: list[float]

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.ours, self.theirs, strict=True)]

    def __str__(self) -> str:
        pairs = zip(self.ours, self.theirs, self.ratios, strict=True)
        parts = [f"{a:9.3f} {b:9.3f} {ratio:8.2f}" for a, b, ratio in pairs]
        return f"{self.name:26}" + "   ".join(parts)


def best(run: Run) -> float:
    """The least time of a run, in milliseconds."""
    times: list[float] = []
    while not times or sum(times) < SECONDS:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times) * 1000


def call(case: Case, inputs: list[Tensor], with_gradients: bool) -> list[Tensor]:
    """The result, or it and the gradients of its sum of squares."""
    if not with_gradients:
        with torch.no_grad():
            return [case.function(*inputs)]
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    result = case.function(*inputs)
    wanted = [x for x in inputs if x.requires_grad]
    found = torch.autograd.grad(result, wanted, 2 * result.detach(), allow_unused=True)
    return [result.detach(), *(x for x in found if x is not None)]


def forms(case: Case) -> tuple[bool, ...]:
    return (False, True) if case.differentiable else (False,)


def measure(name: str, case: Case, dtype: torch.dtype) -> Line:
    """On the CPU, beside PyTorch."""
    theirs = case.make_inputs(dtype)
    ours = [x.to("lazyxla") for x in theirs]

    def run_ours(with_gradients: bool) -> None:
        results = call(case, ours, with_gradients)
        lazyxla.sync(wait=True)
        del results  # alive until here, so that they are computed

    def run_theirs(with_gradients: bool) -> None:
        call(case, theirs, with_gradients)

    line = Line(name, [], [])
    for form in forms(case):
        sides = [functools.partial(run, form) for run in (run_ours, run_theirs)]
        for run in sides:
            run()  # compiles
        times = [[best(run) for run in sides] for _ in range(ROUNDS)]
        line.ours.append(min(ours for ours, _ in times))
        line.theirs.append(min(theirs for _, theirs in times))
    return line


def estimate(name: str, case: Case, dtype: torch.dtype, topology: str) -> Line:
    """By a TPU's compiler, beside the bandwidth of its memory."""
    line = Line(name, [], [])
    for form in forms(case):
        inputs = case.make_inputs(dtype)
        results = call(case, inputs, form)
        nbytes = sum(x.nbytes for x in (*inputs, *results))
        abstract = [torch.empty_like(x, device="lazyxla") for x in inputs]
        function = functools.partial(call, case, with_gradients=form)
        program = lazyxla.aot.compile(function, (abstract,), topology=topology)
        assert program.chip is not None
        line.ours.append((program.estimated_seconds or 0) * 1000)
        line.theirs.append(nbytes / program.chip.bytes_per_second * 1000)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="names of cases, separated by commas")
    parser.add_argument("--dtype", default="float32", help="of floats, as bfloat16")
    parser.add_argument("--topology", help="of the TPU to estimate for, as v5e:1x1")
    args = parser.parse_args()
    dtype: torch.dtype = getattr(torch, args.dtype)
    chosen = args.only.split(",") if args.only else list(CASES)
    if unknown := sorted(set(chosen) - set(CASES)):
        parser.error(f"no such case: {', '.join(unknown)}")
    lazyxla.settings.host_programs = False  # all is compiled, as on other platforms
    peer = "bandwidth" if args.topology else "PyTorch"
    head = f"{'forward':>9} {peer:>9} {'ratio':>8}"
    print(f"{'ms':26}{head}   {head.replace(' forward', 'gradient')}")
    lines = []
    for name in chosen:
        case = CASES[name]
        try:
            lines.append(
                estimate(name, case, dtype, args.topology)
                if args.topology
                else measure(name, case, dtype)
            )
        except RuntimeError as error:  # the result's size is data, or PyTorch lacks the dtype
            print(f"{name:26}{str(error).splitlines()[0]}")
    for line in sorted(lines, key=lambda line: -max(line.ratios)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
