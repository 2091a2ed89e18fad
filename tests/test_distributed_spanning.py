"""torch.distributed where the client spans the processes: collectives are programs of all members.

The cases are those of test_distributed.py, whose programs call the host instead. The plugin is that
of tests/spanning.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.conftest import ROOT
from tests.distributed.all_cases import CASES
from tests.distributed.processes import start
from tests.spanning import plugin_path

SIZES = (2, 3)
OF_EVERY_SIZE = ("collectives",)  # the others take long, and are of one, but if asked for
THEMES = sorted({case.__module__.rpartition(".")[2] for case in CASES.values()})
BY_HOST = (  # some of whose data the host exchanges
    *("all_to_all", "in_a_ring", "functional_collectives"),
    *("pipeline_gpipe", "pipeline_1f1b", "pipeline_interleaved"),
)
SETTLED = ("ddp", "fully_sharded", "zero_sgd", "pipeline_gpipe")
"""Training whose steps compile nothing from the fourth on, and all run as many programs."""

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this PyTorch was built without torch.distributed"
)


def environment() -> dict[str, str]:
    """Of nothing but the plugin's path is anything known before its client starts."""
    return {"LAZYXLA_PLATFORM": "auto", "LAZYXLA_PLUGIN_PATH": str(plugin_path())}


def start_spanning(command: list[str], size: int) -> list[Any]:
    return start(command, size, **environment())


# One test for all cases of a file: processes start slowly.
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("theme", THEMES)
def test_as_on_the_cpu(theme: str, size: int, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    is_asked_for = pytestconfig.getoption("--every-size")
    if size != SIZES[0] and theme not in OF_EVERY_SIZE and not is_asked_for:
        pytest.skip("takes minutes: --every-size runs it")
    names = [name for name, case in CASES.items() if case.__module__.endswith(f".{theme}")]
    script = str(ROOT / "tests" / "distributed" / "ranks.py")
    results = []
    for process in start_spanning([script, str(size), str(tmp_path / "meet"), *names], size):
        out, err = process.communicate(timeout=900)
        assert process.returncode == 0, err[-3000:]
        results.append(json.loads(out.splitlines()[-1]))
    for found in results:
        assert set(found) == set(names)
        problems = "\n".join(f"{name}: {case['problem']}" for name, case in found.items())
        assert not any(case["problem"] for case in found.values()), problems
        check_counts(found)


def check_counts(found: dict[str, Any]) -> None:
    for name, case in found.items():
        assert case["counted"]["fallbacks"] == 0
        assert case["counted"]["host_calls"] == 0, name  # no program calls the host
    for name in found.keys() & set(SETTLED):
        steps = found[name]["steps"]
        assert len(steps) >= 6
        for step in steps[3:]:
            assert step["compiles"] == 0, name
        assert len({step["executions"] for step in steps[3:]}) == 1, name


PROGRAMS = """
import ctypes, os, sys, torch, torch.distributed as dist, lazyxla
rank, meet = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("lazyxla", init_method=f"file://{meet}", rank=rank, world_size=2)
launched = ctypes.CDLL(os.environ["LAZYXLA_PLUGIN_PATH"]).spanning_run_count
launched.restype = ctypes.c_int64
weight = torch.full((3, 5), 2.0, device="lazyxla")
def step(number):
    before, runs = lazyxla.counters(), launched()
    x = torch.full((4, 3), rank + number * 0.5, device="lazyxla")
    x = x @ weight
    dist.all_reduce(x)
    if rank == 0:
        x = x.square().sqrt()  # what only one of them computes
    y = x / 2
    dist.all_reduce(y)
    dist.broadcast(y, 1)
    result = y @ weight.t()
    lazyxla.sync(wait=True)
    after = lazyxla.counters()
    counted = [after[name] - before[name] for name in ("flushes", "executions", "compiles")]
    return [*counted, launched() - runs, result.unique().tolist()]
for number in range(4):
    print(*step(number))
"""


def test_each_collective_is_a_program_of_all(tmp_path: Path) -> None:
    """One flush, of the process's own programs and three of both; none is compiled twice."""
    script = tmp_path / "programs.py"
    script.write_text(PROGRAMS)
    for process in start_spanning([str(script), str(tmp_path / "meet")], 2):
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err[-3000:]
        steps = [line.split(maxsplit=4) for line in out.splitlines()]
        assert [step[:2] for step in steps] == [["1", "6"]] * 4
        assert steps[-1][2] == "0"
        assert [step[3] for step in steps] == ["3"] * 4
        sums = [2 * (number * 0.5) * 6 + 6 for number in range(4)]
        assert [float(step[4].strip("[]")) for step in steps] == [10 * total for total in sums]


def test_processes_that_die_come_late_or_call_something_else(pytestconfig: pytest.Config) -> None:
    """What is compared launches nothing that the others do not launch, and tells who differs."""
    count = pytestconfig.getoption("--faults")
    result = subprocess.run(
        [sys.executable, "-m", "tests.distributed.faults", str(count), "0", "always"],
        capture_output=True,
        text=True,
        timeout=120 + 30 * count,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment()},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads(result.stdout.splitlines()[-1]) == []
