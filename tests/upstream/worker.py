"""A worker process: tests of one file, one per line of its input (name and timeout), and one
outcome per line.

First it prints the names of all tests that are made for the device. Tests may print, so the
outcomes go to the original standard output, and everything else to the standard error.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from torch.testing._internal.common_device_type import CPUTestBase, PrivateUse1TestBase

import lazyxla
from lazyxla.modes import EagerMode
from tests.upstream.compatibility import add_missing_names, load, make_for_all_devices

MODES: dict[str, EagerMode] = {"lazy": False, "eager": True, "fused": "fused"}


def main(directory: str, file: str, device: str, mode: str) -> None:
    outcomes = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, directory)
    os.chdir(directory)
    add_missing_names()
    make_for_all_devices()
    lazyxla.eager_mode(MODES[mode])
    answer(dict(_tests(load(Path(directory, f"{file}.py")), device)), run, outcomes)


Run = Callable[[unittest.TestCase, float], tuple[str, str]]
"""Runs a test for so many seconds at most. Returns what happened, and the error."""


def answer(tests: dict[str, unittest.TestCase], run: Run, outcomes: TextIO) -> None:
    """Says which tests there are, then runs those that the standard input names."""
    print(json.dumps(list(tests)), file=outcomes, flush=True)
    for line in sys.stdin:
        name, timeout = line.split()
        start = time.monotonic()
        kind, message = run(tests[name], float(timeout))
        seconds = round(time.monotonic() - start, 2)
        reply = {"kind": kind, "message": message, "seconds": seconds}
        print(json.dumps(reply), file=outcomes, flush=True)


def _tests(module: Any, device: str) -> Iterator[tuple[str, unittest.TestCase]]:
    """The tests that the module made for a device, named as "Class.test".

    The class is named without the device: PyTorch appends the backend's name to some, PRIVATEUSE1
    to others.
    """
    base = CPUTestBase if device == "cpu" else PrivateUse1TestBase
    for cls in list(vars(module).values()):
        if isinstance(cls, type) and issubclass(cls, base) and cls is not base:
            name = re.sub("(PRIVATEUSE1|LAZYXLA|CPU)$", "", cls.__name__)
            for test in unittest.defaultTestLoader.getTestCaseNames(cls):
                yield f"{name}.{test}", cls(test)


class _TooSlow(BaseException):
    """Ends a test that takes too long, between two steps of the interpreter."""


def run(test: unittest.TestCase, timeout: float) -> tuple[str, str]:
    """Runs a test, with its class's own preparations. Returns what happened, and the error."""
    interrupted = []

    def interrupt(*_: object) -> None:
        interrupted.append(True)
        raise _TooSlow

    result = unittest.TestResult()
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, timeout)
    try:
        unittest.TestSuite([test]).run(result)
    except _TooSlow:  # between test and clean-up
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if interrupted:
        return "timeout", f"not done within {timeout:g} s"
    errors = [text for _, text in result.failures + result.errors]
    if result.unexpectedSuccesses:
        errors.append("passes, but is marked with expectedFailure")
    if errors:
        # Long ones list a dispatch table, behind what is of interest.
        return "failed", errors[0][-4000:]
    if result.skipped:
        return "skipped", result.skipped[0][1]
    return "passed", ""


if __name__ == "__main__":
    main(*sys.argv[1:])
