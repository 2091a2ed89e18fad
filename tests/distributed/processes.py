"""Starting the processes of a test."""

from __future__ import annotations

import os
import subprocess
import sys

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
