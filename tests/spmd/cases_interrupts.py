"""Ctrl-C at random moments of sharded training leaves each tensor old or new, and spread as it was.

``pytest "tests/test_spmd.py::test_on_eight_devices[cases_interrupts.py]" --programs 8000`` presses
it more often.
"""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Iterator

import pytest
from random_interrupts import InterruptedTraining

from tests import interrupted_training

SHARE = 100  # there is a training for so many programs
STEPS, SIGNALS = 12, 6


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("number", range(metafunc.config.getoption("--programs") // SHARE))


@pytest.fixture
def interrupted(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[interrupted_training.Interrupted]:
    monkeypatch.setattr(sys, "unraisablehook", interrupted_training.note_dropped)
    before = signal.signal(signal.SIGINT, interrupted_training.handler)
    interrupted = interrupted_training.Interrupted(SIGNALS, number, longest=0.5)
    yield interrupted
    interrupted.sender.kill()
    interrupted.sender.wait()
    signal.signal(signal.SIGINT, before)


def test_interrupted_trainings(number: int, interrupted: interrupted_training.Interrupted) -> None:
    training = InterruptedTraining(random.Random(number), interrupted)
    try:
        training.run(STEPS)
    except BaseException as error:
        error.add_note("\n".join(training.lines))
        raise
    assert training.interrupts > 0
