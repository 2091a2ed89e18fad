"""A process that answers lines with lines, and may crash or hang."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_MOST_MAPPINGS = 30_000
"""A compiled program takes 18 memory mappings of its process, for good; Linux allows 65,530, and at
the last one XLA's compiler crashes. An entry of the operator table may take 26,000."""


class WorkerProcess:
    """Started when it is first asked, and again after it was stopped."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._command = command
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self._environment = {"LAZYXLA_PLATFORM": "cpu", **environment, "PYTHONPATH": paths}
        self._process: subprocess.Popen[str] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int | None:
        """Of the process; None if it is not running."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=self._environment,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(
            target=_read, args=(self._process.stdout, self._lines), daemon=True
        ).start()

    def ask(self, line: str, timeout: float) -> str | None:
        """The answer, or None if the process ended; then `status` tells how.

        Raises:
            TimeoutError: there is none within so many seconds. The process is stopped.
        """
        if self._process is None:
            self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError:
            return None
        return self.read(timeout)

    def read(self, timeout: float) -> str | None:
        """The next line, as `ask` has it."""
        try:
            return self._lines.get(timeout=timeout)
        except queue.Empty:
            self.stop()
            raise TimeoutError from None

    def end(self) -> int:
        """Waits for a process that has ended by itself; its exit status."""
        assert self._process is not None
        status = self._process.wait()
        self.stop()
        return status

    def stop(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def has_many_programs(self) -> bool:
        """Whether it has compiled so much that another process should go on."""
        if self._process is None:
            return False
        try:
            mappings = Path(f"/proc/{self._process.pid}/maps").read_bytes().count(b"\n")
        except OSError:  # it has ended
            return False
        return mappings > _MOST_MAPPINGS


def _read(stream: Iterable[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)
