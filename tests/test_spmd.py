"""The cases of tests/spmd, each file with eight devices: of one process, and of two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spanning import environments

ROOT = Path(__file__).resolve().parent.parent
DEVICES = 8
CASES = sorted(path.name for path in (ROOT / "tests/spmd").glob("cases_*.py"))
OF_ONE_PROCESS = {
    "cases_processes.py",  # starts processes of its own
    "cases_topologies.py",  # is about devices that are not there
}


def start(cases: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/spmd/{cases}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment,
    )


def check(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output


@pytest.mark.parametrize("cases", CASES)
def test_on_eight_devices(cases: str) -> None:
    own = {"LAZYXLA_PLATFORM": "cpu", "LAZYXLA_CPU_DEVICES": str(DEVICES)}
    check(start(cases, {**os.environ, **own}))


@pytest.mark.parametrize("cases", sorted(set(CASES) - OF_ONE_PROCESS))
def test_on_eight_devices_of_two_processes(cases: str) -> None:
    """By a plugin whose client spans processes, as TPUs' and GPUs' do: tests/spanning."""
    with environments(2, devices=DEVICES // 2) as own:
        processes = [start(cases, each) for each in own]
        try:
            for process in processes:
                check(process)
        finally:
            for process in processes:
                process.kill()
