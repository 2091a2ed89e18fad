"""A worker process of one test file, and how it is asked."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

_MOST_MAPPINGS = 30_000
"""A compiled program takes 18 memory mappings of its process, for good; Linux allows 65,530, and at
the last one XLA's compiler crashes."""

_GRACE = 30.0
"""Seconds for an interrupted test to end: as long as a program may take to compile."""


class Worker:
    """Runs tests of one file one after the other; in a new process after a crash or a timeout."""

    def __init__(
        self, directory: Path, file: str, cache: Path, device: str = "lazyxla", mode: str = "lazy"
    ) -> None:
        command = [sys.executable, "-m", "tests.upstream.worker"]
        self._command = [*command, str(directory), file, device, mode]
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self._environment = {
            "LAZYXLA_PLATFORM": "cpu",
            "LAZYXLA_CPU_DEVICES": "2",
            "LAZYXLA_CACHE_DIR": str(cache),
            **os.environ,
            "PYTORCH_TESTING_DEVICE_ONLY_FOR": "cpu" if device == "cpu" else "privateuse1",
            "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
            "PYTHONPATH": paths,
        }
        self._process: subprocess.Popen[str] | None = None
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
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(f"{test} {timeout}\n")
            process.stdin.flush()
            line = self._lines.get(timeout=timeout + _GRACE)
        except queue.Empty:
            self.stop()
            return _outcome("timeout", f"not done within {timeout:g} s, nor to interrupt", timeout)
        except OSError:
            line = None
        if line is None:
            status = process.wait()
            self.stop()
            return _outcome("crashed", f"the process ended with {status}", 0)
        if _mappings(process.pid) > _MOST_MAPPINGS:
            self.stop()
        return json.loads(line)

    def stop(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=self._environment,
        )
        self._process = process
        self._interrupted = False
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(process.stdout, self._lines), daemon=True).start()
        names = self._lines.get(timeout=300)
        if names is None:
            raise RuntimeError(f"the tests cannot be loaded: {' '.join(self._command)}")
        self.tests = json.loads(names)
        return process


def _outcome(kind: str, message: str, seconds: float) -> dict[str, Any]:
    return {"kind": kind, "message": message, "seconds": seconds}


def _read(stream: Iterable[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _mappings(process: int) -> int:
    """How many memory mappings a process has; 0 if it has ended."""
    try:
        return Path(f"/proc/{process}/maps").read_bytes().count(b"\n")
    except OSError:
        return 0
