"""Graphs that are cut, when something goes wrong: interrupts, and a stage that fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch

import lazyxla
from tests.conftest import ROOT
from tests.support import DEVICE, counted


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def test_interrupts_while_a_cut_is_made() -> None:
    """What was recorded runs all the same, and nothing is lost."""
    weights = [torch.full((16, 16), 0.01 * i, dtype=torch.float64) for i in range(1, 25)]
    ours = [weight.to(DEVICE) for weight in weights]
    x = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(4, 16)
    before = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0

    def step(x: torch.Tensor, weights: list[torch.Tensor], number: int) -> None:
        for bit in range(5):  # another sequence of operators for each number
            x = x.sin() if number >> bit & 1 else x.flip(0)
        for weight in weights:
            x = torch.tanh(x @ weight)
            weight.mul_(0.9).add_(x.mean() * 0.1)

    try:
        with counted() as n:
            for number in range(24):
                step(x, weights, number)
                step(x.to(DEVICE), ours, number)
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.002 * (1 + number % 12))
                    lazyxla.sync()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    for mine, other in zip(ours, weights, strict=True):
        torch.testing.assert_close(mine.cpu(), other)
    assert interrupted > 4
    assert n.graphs_cut > 10


WEIGHTS = [f"weight {i}" for i in range(8)]


@pytest.mark.parametrize(
    ("how", "stage", "changed", "lost"),
    [
        # What was not run leaves everything as it was.
        ("execute", 0, [], []),
        ("execute", 1, [], []),
        # The second stage ran and had the weights' memory: its results stand, as do the first's.
        ("execute", 2, ["turned", *WEIGHTS], []),
        # What a stage computes of something that failed fails, and has consumed the weights.
        ("later", 0, [], [*WEIGHTS, "seen"]),
        ("later", 1, [], [*WEIGHTS, "seen"]),
        ("later", 2, ["turned", *WEIGHTS], ["seen"]),
    ],
)
def test_a_stage_that_fails(
    how: str,
    stage: int,
    changed: list[str],
    lost: list[str],
    plugin: Callable[[str], dict[str, str]],
) -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests/failing_stages.py"), how, str(stage)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), **plugin("failing")},
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["executions"] == 3
    assert found["written"] == ["turned", *WEIGHTS, "seen"]
    assert "no memory in this test" in found["message"]
    assert (found["changed"], found["lost"]) == (changed, lost)
