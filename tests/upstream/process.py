"""A worker process of one test file, and how it is asked."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.worker_process import WorkerProcess

_GRACE = 30.0
"""Seconds for an interrupted test to end: as long as a program may take to compile."""


class Worker:
    """Runs tests of one file one after the other; in a new process after a crash or a timeout.

    `module` is what such a process runs: a module beside `worker`, called the same way. `plugin`
    makes the library of another plugin than the CPU's, for the tests on the device; it has so many
    devices whatever the environment says.
    """

    def __init__(
        self,
        directory: Path,
        file: str,
        cache: Path,
        device: str = "lazyxla",
        mode: str = "lazy",
        module: str = "tests.upstream.worker",
        devices: int = 2,
        plugin: Callable[[], Path] | None = None,
    ) -> None:
        command = [sys.executable, "-m", module]
        environment = {
            "LAZYXLA_CPU_DEVICES": str(devices),
            "LAZYXLA_CACHE_DIR": str(cache),
            "LAZYXLA_HOST_PROGRAMS": "0",  # the tests are for the programs that are compiled
            **os.environ,
            "PYTORCH_TESTING_DEVICE_ONLY_FOR": "cpu" if device == "cpu" else "privateuse1",
            "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
        }
        if plugin is not None and device != "cpu":
            environment["LAZYXLA_PLUGIN_PATH"] = str(plugin())
            environment["LAZYXLA_CPU_DEVICES"] = str(devices)
        self._process = WorkerProcess([*command, str(directory), file, device, mode], environment)
        self._file = file
        self.tests: list[str] = []
        self._start()

    def run(self, test: str, timeout: float) -> dict[str, Any]:
        """The outcome of a test: kind, message, seconds.

        A test that takes too long is interrupted, and the process goes on; what fails in it later
        is run again in a new one.
        """
        outcome = self._run_once(test, timeout)
        if outcome["kind"] == "failed" and self._interrupted:
            self.stop()
            outcome = self._run_once(test, timeout)
        self._interrupted |= outcome["kind"] == "timeout"
        return outcome

    def _run_once(self, test: str, timeout: float) -> dict[str, Any]:
        if not self._process.is_running:
            self._start()
        try:
            line = self._process.ask(f"{test} {timeout}", timeout + _GRACE)
        except TimeoutError:
            return _outcome("timeout", f"not done within {timeout:g} s, nor to interrupt", timeout)
        if line is None:
            return _outcome("crashed", f"the process ended with {self._process.end()}", 0)
        if self._process.has_many_programs():
            self.stop()
        outcome: dict[str, Any] = json.loads(line)
        return outcome

    def stop(self) -> None:
        """Ends the process."""
        self._process.stop()

    def _start(self) -> None:
        self._process.start()
        self._interrupted = False
        names = self._process.read(timeout=300)
        if names is None:
            raise RuntimeError(f"the tests of {self._file} cannot be loaded")
        self.tests = json.loads(names)


def _outcome(kind: str, message: str, seconds: float) -> dict[str, Any]:
    return {"kind": kind, "message": message, "seconds": seconds}
