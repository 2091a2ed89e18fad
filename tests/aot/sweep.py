"""Compiles one call of every operator that has a rule for TPUs, or for GPUs:
``python -m tests.aot.sweep --topology h100``.

Needs their compiler, and none of them. Ends with status 1 if what is refused is not what
expected.py says.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from lazyxla import aot
from lazyxla.lowering import Program, registry
from tests.aot.calls import find, find_all, made_by_hand
from tests.aot.compiling import refusal
from tests.aot.expected import REFUSED


def check(topology: aot.Topology, dtype: str) -> list[str]:
    """What is not as expected, of calls of one dtype."""
    wrong = []
    platform = topology.platform
    if dtype == "float32":
        programs = find_all(platform)
        without = set(registry.names(platform)) - programs.keys()
        wrong += [f"{name}: no call was found" for name in sorted(without)]
    else:
        programs = _find(platform, getattr(torch, dtype))
    begin = time.monotonic()
    for name, program in sorted(programs.items()):
        message, expected = refusal(topology, program), REFUSED.get((platform, dtype, name))
        if message is None and expected is not None:
            wrong.append(f"{name} ({dtype}): compiles, and is listed as refused")
        elif message is not None and (expected is None or expected not in message):
            wrong.append(f"{name} ({dtype}): {message}")
    took = time.monotonic() - begin
    print(f"{dtype}: {len(programs)} operators compiled for {topology} in {took:.0f} s", flush=True)
    return wrong


def _find(platform: str, dtype: torch.dtype) -> dict[str, Program]:
    programs = find(registry.names(platform), dtype)
    return programs | (made_by_hand(dtype) if dtype.is_floating_point else {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    arguments = parser.parse_args()
    topology = aot.topology(arguments.topology)
    wrong = [line for dtype in arguments.dtypes for line in check(topology, dtype)]
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
