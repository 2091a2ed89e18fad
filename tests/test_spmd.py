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
    "cases_failures.py",  # has a plugin of its own
    "cases_interrupts.py",  # interrupts one process
    "cases_processes.py",  # starts processes of its own
    "cases_random.py",  # shrinks what fails, and has meshes of some devices
    "cases_threads.py",  # launches programs in any order
    "cases_topologies.py",  # is about devices that are not there
}


def start(cases: str, environment: dict[str, str], *options: str) -> subprocess.Popen[str]:
    command = ["pytest", "-q", "-p", "no:cacheprovider", f"tests/spmd/{cases}", *options]
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment,
    )


def check(process: subprocess.Popen[str], programs: int = 400) -> None:
    output, _ = process.communicate(timeout=900 + 2 * programs)
    assert process.returncode == 0, output


@pytest.mark.parametrize("cases", CASES)
def test_on_eight_devices(cases: str, request: pytest.FixtureRequest) -> None:
    own = {"LAZYXLA_PLATFORM": "cpu", "LAZYXLA_CPU_DEVICES": str(DEVICES)}
    if cases == "cases_failures.py":
        own |= request.getfixturevalue("plugin")("failing")
    programs, rounds = (
        request.config.getoption(name) for name in ("--programs", "--thread-rounds")
    )
    options = ("--programs", str(programs), "--thread-rounds", str(rounds))
    check(start(cases, {**os.environ, **own}, *options), programs + 10 * rounds)


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
