"""Presses Ctrl-C at random moments of training: in every mode, cold and warm.

    python -m tests.interrupts --count 300 [--host-programs]

Each training (interrupted_training.py) must end, without a crash or a hang, at the losses of one
that nobody disturbed. With ``--host-programs`` PyTorch's kernels run what is new; then the losses
may differ in the last bits, as a step that is run again is no longer the first of its kind. Prints
a table, and exits with 1 if one did not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODES = ("lazy", "region", "eager", "fused", "compile")
SECONDS = 1.0  # that KeyboardInterrupt may take


@dataclass
class Result:
    """What became of the trainings of one mode, cold or warm."""

    mode: str
    cold: bool
    interrupts: int
    longest: float
    problem: str


def train(
    mode: str, cold: bool, signals: int, seed: int, host_programs: bool = False
) -> dict[str, Any] | str:
    """One training in a process of its own; what went wrong, if it did."""
    arguments = [mode, str(int(cold)), str(signals), str(seed)]
    with tempfile.TemporaryDirectory() as directory:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "LAZYXLA_CACHE_SIZE": "0",
            "LAZYXLA_HOST_PROGRAMS": str(int(host_programs)),
            "LAZYXLA_CACHE_DIR": directory,
        }
        try:
            result = subprocess.run(
                [sys.executable, str(ROOT / "tests/interrupted_training.py"), *arguments],
                capture_output=True,
                text=True,
                timeout=240,
                env=environment,
            )
        except subprocess.TimeoutExpired:
            return "hangs"
    if result.returncode != 0:
        return f"exit status {result.returncode}: {result.stderr[-2000:]}"
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def run(mode: str, cold: bool, count: int, seed: int, host_programs: bool = False) -> Result:
    """Trainings with `count` interrupts in all."""
    undisturbed = train(mode, cold, 0, seed, host_programs)
    if isinstance(undisturbed, str):
        return Result(mode, cold, 0, 0.0, f"undisturbed: {undisturbed}")
    done, longest = 0, 0.0
    while done < count:
        found = train(mode, cold, min(10, count - done), seed + done, host_programs)
        if isinstance(found, str):
            return Result(mode, cold, done, longest, found)
        done += len(found["latencies"])
        longest = max([longest, *found["latencies"]])
        tolerance = 1e-6 if host_programs else 0.0  # of float32; the losses are about 1
        pairs = zip(found["losses"], undisturbed["losses"])
        if not all(math.isclose(*pair, rel_tol=tolerance) for pair in pairs):
            return Result(mode, cold, done, longest, "other losses")
        if not found["latencies"]:
            return Result(mode, cold, done, longest, "no interrupt hit a step")
    problem = f"took {longest:.2f} s" if longest > SECONDS else ""
    return Result(mode, cold, done, longest, problem)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="of interrupts in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--host-programs", action="store_true")
    arguments = parser.parse_args()
    each = -(-arguments.count // (2 * len(MODES)))
    print("| mode | programs | interrupts | longest wait | problem |")
    print("|---|---|---|---|---|")
    bad = False
    for mode in MODES:
        for cold in (True, False):
            result = run(mode, cold, each, arguments.seed, arguments.host_programs)
            bad = bad or bool(result.problem)
            kind = "new in every step" if cold else "known"
            print(
                f"| {mode} | {kind} | {result.interrupts} | {result.longest:.2f} s | "
                f"{result.problem or 'none'} |",
                flush=True,
            )
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
