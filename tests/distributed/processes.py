"""Starting the processes of a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from tests.conftest import ROOT


def start(command: list[str], size: int, **environment: str) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [sys.executable, *command[:1], str(rank), *command[1:]],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        )
        for rank in range(size)
    ]


def results_of(
    processes: Iterable[subprocess.Popen[str]], names: Iterable[str], timeout: float
) -> list[dict[str, Any]]:
    """What each process of tests/distributed/ranks.py found for these cases; none has a problem."""
    results = []
    for process in processes:
        out, err = process.communicate(timeout=timeout)
        assert process.returncode == 0, err[-3000:]
        results.append(json.loads(out.splitlines()[-1]))
    for found in results:
        assert set(found) == set(names)
        problems = "\n".join(f"{name}: {case['problem']}" for name, case in found.items())
        assert not any(case["problem"] for case in found.values()), problems
    return results
