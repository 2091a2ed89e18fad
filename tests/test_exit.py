"""Processes end with exit status 0 and without a word, whatever the device is doing.

``pytest tests/test_exit.py --exits 500`` tries more than the ordinary run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import ROOT


def problems(kind: str, count: int, seed: int) -> list[dict[str, str]]:
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "exits.py"), kind, str(count), str(seed)],
        capture_output=True,
        text=True,
        timeout=60 + 30 * count,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LAZYXLA_CACHE_SIZE": "100"},
    )
    assert result.returncode == 0, result.stderr
    found: list[dict[str, str]] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_ends_in_the_middle_of_work(pytestconfig: pytest.Config) -> None:
    """With tensors alive, work pending, programs compiling or running, and loaders uploading."""
    assert problems("exit", pytestconfig.getoption("--exits"), 1) == []


def test_forked_children_end(pytestconfig: pytest.Config) -> None:
    """Children of a process whose threads are all at work, whether they touch the device or not."""
    assert problems("fork", pytestconfig.getoption("--exits"), 2) == []


def test_processes_that_watch_others_end() -> None:
    """They are seen to be alive whatever their threads do, and wait for none that is gone."""
    assert problems("watched", 5, 3) == []


WORK = """
import torch, lazyxla
x = torch.randn(2000, 2000).to("lazyxla")
y = x
for _ in range(20):
    y = y @ x * 1e-2
lazyxla.sync()  # the plugin makes its kernels while the process ends
"""


def test_long_work_at_the_end(run_python: Callable[..., Any]) -> None:
    run_python(WORK)
