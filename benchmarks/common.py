"""What the programs that measure share. Imports nothing heavy: the clock starts here.

Every program measures one side (lazyxla or a peer) of one benchmark in a process of its own, and
prints one line of JSON; ``run.py`` starts them and makes the table.
"""

from __future__ import annotations

import time

START = time.perf_counter()

import argparse  # noqa: E402
import fcntl  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

# A peer does not pay for importing lazyxla, nor does PyTorch's import in lazyxla's own figures.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]  # lazyxla, and the examples' models


def since_start() -> float:
    """Seconds since this program's first line."""
    return time.perf_counter() - START


parser = argparse.ArgumentParser()
"""A program adds options of its own before it calls `arguments`."""

Axes = dict[str, int]


def mesh_of(text: str) -> Axes:
    """``"data=4,model=2"`` as the lengths of a mesh's axes, for an option; the process then has as
    many of the CPU plugin's devices."""
    axes = {name: int(size) for name, size in (axis.split("=") for axis in text.split(","))}
    os.environ["LAZYXLA_CPU_DEVICES"] = str(math.prod(axes.values()))
    return axes


def jax_devices(count: int) -> list[Any]:
    """JAX's devices, so many of the CPU plugin that lazyxla runs on."""
    import jax
    from jax._src.xla_bridge import register_plugin  # there is no public way

    from lazyxla.platforms import plugin_of

    options = {"cpu_device_count": count}
    register_plugin("embedded", library_path=plugin_of("cpu"), options=options)
    jax.config.update("jax_platforms", "embedded")
    return jax.devices()


def arguments(*sides: str, models: Sequence[str] = ()) -> argparse.Namespace:
    """Reads ``--side``, ``--model`` and ``--threads``, and keeps this process to that many CPUs.

    A program with models that is told none runs itself for each of them, and ends.

    Call it before importing torch or JAX: both look at the process's CPUs when they start, so all
    sides get the same number of threads.
    """
    parser.add_argument("--side", choices=sides, default=sides[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--model", choices=models)
    args = parser.parse_args()
    if models and not args.model:
        _run_each(models)
        sys.exit()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    return args


def _run_each(models: Sequence[str]) -> None:
    """Runs this program once for each model, and reports all figures: "<model>.<figure>"."""
    figures: dict[str, float] = {}
    for name in models:
        command = [sys.executable, *sys.argv, "--model", name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        child = json.loads(done.stdout.splitlines()[-1])
        figures |= {f"{name}.{key}": value for key, value in child.items()}
    report(**figures)


def step_times(
    step: Callable[[], object], wait: Callable[[], object], *, blocks: int, steps: int
) -> dict[str, float]:
    """The best of ``blocks`` blocks of ``steps`` steps, in milliseconds per step.

    ``step_ms`` is the time on the wall, ``step_cpu_ms`` the processor time of all threads, which
    other programs on the machine disturb less. The host may run ahead within a block; ``wait`` ends
    it.
    """
    wall, processor = [], []
    for _ in range(blocks):
        begin, begin_processor = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        wait()
        wall.append(time.perf_counter() - begin)
        processor.append(time.process_time() - begin_processor)
    return {"step_ms": min(wall) * 1e3 / steps, "step_cpu_ms": min(processor) * 1e3 / steps}


def settled(step: Callable[[], Any], sync: Callable[..., None], blocks: int, steps: int) -> None:
    """Reports what a training step takes: the first one, its loss, and later ones.

    Args:
        step: a step, which returns its loss.
        sync: takes `wait`: whether to wait for the device.
        blocks, steps: see `step_times`.
    """
    first = step()
    sync(wait=True)
    figures = {"first_step_s": since_start(), "loss": first.item()}
    for _ in range(3):
        step()
    sync(wait=True)
    figures |= step_times(step, lambda: sync(wait=True), blocks=blocks, steps=steps)
    report(**figures)


class Turns:
    """Lets programs that run at the same time warm up together and measure one after the other.

    Args:
        path: a file that all of them name; None for a program that runs alone. Whoever warms up
            holds a shared lock on it, whoever measures an exclusive one.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("a") if path else None
        self._lock(fcntl.LOCK_SH)

    def begin(self) -> None:
        """Waits until all others have warmed up, or measured."""
        self._lock(fcntl.LOCK_UN)
        self._lock(fcntl.LOCK_EX)

    def end(self) -> None:
        """Lets the next one measure."""
        self._lock(fcntl.LOCK_UN)

    def _lock(self, operation: int) -> None:
        if self._file:
            fcntl.flock(self._file, operation)


def report(**figures: float) -> None:
    """Prints the figures for run.py."""
    print(json.dumps(figures), flush=True)
