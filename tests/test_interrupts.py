"""Ctrl-C at random moments loses nothing; `python -m tests.interrupts` tries it more often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.interrupts import MODES, SECONDS, run


@pytest.mark.parametrize(
    ("mode", "host_programs"),
    [*((mode, False) for mode in MODES), *((mode, True) for mode in ("lazy", "eager", "fused"))],
)
def test_interrupted_training_ends_as_an_undisturbed_one(mode: str, host_programs: bool) -> None:
    result = run(mode, cold=True, count=4, seed=11, host_programs=host_programs)
    # Waiting for a processor is in it; the command, which runs alone, is strict.
    if result.problem.startswith("took"):
        assert result.longest < 10 * SECONDS
    else:
        assert result.problem == ""
    assert result.interrupts == 4


COMPILING = """
import os, signal, sys, threading, time
import torch, lazyxla
signal.signal(signal.SIGINT, signal.default_int_handler)  # which jobs in the background ignore
lazyxla.settings.cut_graphs = False  # one program, which takes long to compile
x = torch.ones(64, 64, device="lazyxla")
(x + 1).cpu()
y = x
for i in range(4000):
    y = (y @ x).sin() if i % 5 == 0 else y.sin() * 1.5
kept = x.add_(1)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    lazyxla.sync()
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted")
compiles = lazyxla.counters()["compiles"]
if len(sys.argv) < 2:
    lazyxla.sync(wait=True)  # what was interrupted has gone on
    assert torch.equal(x.cpu(), torch.full((64, 64), 2.0))
    assert y.isfinite().all().item()
    assert lazyxla.counters()["compiles"] <= compiles + 2
"""


def test_the_compiler_goes_on_after_an_interrupt(run_python: Callable[..., Any]) -> None:
    # The program takes most of a minute to compile, longer beside other tests.
    assert run_python(COMPILING, timeout=300).stdout.split() == ["interrupted"]


def test_a_process_may_end_after_an_interrupt(run_python: Callable[..., Any]) -> None:
    ending = COMPILING.replace("if len(sys.argv) < 2:", "if False:")
    result = run_python(ending, timeout=300)
    assert result.stdout.split() == ["interrupted"]
    assert result.returncode == 0
