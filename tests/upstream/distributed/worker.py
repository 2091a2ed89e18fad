"""A worker process of one file of tests for many processes; see `tests.upstream.worker`.

It imports the file and starts no device. Each test runs in a process that is forked from here, and
so do the processes that the test starts: none imports anything again, and all are ended together.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
import unittest
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from tests.upstream import worker
from tests.upstream.compatibility import add_missing_names
from tests.upstream.distributed import compatibility, names

_GRACE = 5.0
"""Seconds for an interrupted test to end by itself."""


def main(directory: str, file: str, device: str, mode: str) -> None:
    outcomes = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path[:0] = [directory, str(Path(directory, file).parent)]
    os.chdir(directory)
    own_device = False
    if device != "cpu":
        import lazyxla

        lazyxla.eager_mode(worker.MODES[mode])
        own_device = lazyxla.device_count() == 1
    names.install(Path(directory), device, own_device)
    add_missing_names()
    compatibility.prepare(device, own_device)
    module = importlib.import_module(file.replace("/", "."))
    worker.answer(dict(_tests(module)), _run, outcomes)


def _tests(module: ModuleType) -> Iterator[tuple[str, unittest.TestCase]]:
    """The tests that the module has, named as "Class.test"."""
    for cls in list(vars(module).values()):
        if isinstance(cls, type) and issubclass(cls, unittest.TestCase):
            if cls.__module__.startswith(("torch.", "unittest")):
                continue  # imported
            for test in unittest.defaultTestLoader.getTestCaseNames(cls):
                yield f"{cls.__name__}.{test}", cls(test)


def _run(test: unittest.TestCase, timeout: float) -> tuple[str, str]:
    """Runs a test in a process of its own; whatever it started is ended with it."""
    reads, writes = os.pipe()
    process = os.fork()
    if process == 0:
        os.setsid()
        line = json.dumps(worker.run(test, timeout)) + "\n"
        with open(writes, "w") as pipe:
            pipe.write(line)
        os._exit(0)
    os.close(writes)
    with open(reads) as pipe:
        ready, _, _ = select.select([pipe], [], [], timeout + _GRACE)
        line = pipe.readline() if ready else ""
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    if line:
        kind, message = json.loads(line)
        return kind, message
    if not ready:
        return "timeout", f"not done within {timeout:g} s"
    return "crashed", f"the process ended with {os.waitstatus_to_exitcode(status)}"


if __name__ == "__main__":
    main(*sys.argv[1:])
