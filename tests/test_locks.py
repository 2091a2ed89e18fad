"""Guarded values: what they exclude, and what a build that checks their rule does."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ["tests/locks.cpp", "csrc/common/waiting.cpp"]

KEPT = {
    "count": 80000,
    "count spinning": 80000,
    "pass on": 2000,
    "time out": 0,
    "announced": 1000,
    "guarded under ordered": 1,
    "one after the other": 10,
}
"""What the program's cases that keep the rule count. The others have a "!"."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("locks") / "locks"
    flags = ["-std=c++20", "-Icsrc", "-Wall", "-pthread", "-DLAZYXLA_CHECK_LOCKS"]
    subprocess.run(["c++", *flags, *SOURCES, "-o", str(built)], check=True, cwd=ROOT)
    return built


def run(program: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), *args], capture_output=True, text=True, timeout=60)


def test_guarded_values(program: Path) -> None:
    for case, expected in KEPT.items():
        result = run(program, case)
        assert (result.returncode, result.stdout) == (0, f"{expected}\n"), (case, result.stderr)


def test_nothing_is_taken_under_a_guarded_value(program: Path) -> None:
    broken = [case for case in run(program).stdout.splitlines() if case not in KEPT]
    assert len(broken) == 8
    for case in broken:
        result = run(program, case)
        assert result.returncode == -signal.SIGABRT, case
        assert "a Guarded value is held where another lock is taken" in result.stderr, case
