"""One process, many devices: the cases of tests/spmd, each file in a process with eight devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CASES = sorted(path.name for path in (ROOT / "tests/spmd").glob("cases_*.py"))


@pytest.mark.parametrize("cases", CASES)
def test_on_eight_devices(cases: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/spmd/{cases}"],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=ROOT,
        env={**os.environ, "LAZYXLA_PLATFORM": "cpu", "LAZYXLA_CPU_DEVICES": "8"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
