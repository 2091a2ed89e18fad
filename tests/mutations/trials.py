"""One mistake at a time in a copy of the sources, and the tests that are run on it.

The copy lies in build/mutations. The working tree is only read, so that nothing that befalls a run
(Ctrl-C, a crash, a power cut) leaves a mistake in it. What one run left broken in the copy, another
copies again.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
COPY = ROOT / "build" / "mutations"
SECONDS = 900
"""Tests that take longer hang: the mistake is noticed."""

_BUILD = "build/extension"

_SHARDED = "tests/spmd/"
_DEVICES = {"LAZYXLA_PLATFORM": "cpu", "LAZYXLA_CPU_DEVICES": "8"}
"""Of these tests, which tests/test_spmd.py starts by the file: one of them alone says more."""

_SITE = """\
# An editable install finds lazyxla in the working tree before it looks here. Its finder's module
# is called _lazyxla_editable or _editable_skbc_lazyxla, by the version of scikit-build-core.
import sys

sys.meta_path[:] = [f for f in sys.meta_path if "lazyxla" not in type(f).__module__]
"""


class Mutation(NamedTuple):
    """What to write in one place of a file."""

    path: Path
    """From the root of the sources."""
    line: int
    place: str
    """The function."""
    before: str
    after: str
    start: int
    """Where ``before`` stands."""
    context: str = ""
    """Its line, where ``before`` alone tells nothing."""

    def of(self, source: str) -> str:
        """The whole file, broken."""
        end = self.start + len(self.before)
        if source[self.start : end] != self.before:
            raise ValueError(f"{self.path} has changed")
        return source[: self.start] + self.after + source[end:]

    def __str__(self) -> str:
        before = f"{self.before}  in  {self.context}" if self.context else self.before
        return f"{self.path}:{self.line} {self.place}: {before}  ->  {self.after}"


class Outcome(NamedTuple):
    failed: bool
    reason: str
    """The first test that failed, or what else happened."""


class CannotBuild(Exception):
    pass


class Copy:
    """The sources to break. C++ is compiled there if ``compiled``, else the extension is copied."""

    def __init__(self, compiled: bool, processes: int) -> None:
        self.processes = processes
        self.compiled = compiled
        self.failing: list[str] = []
        """Tests that fail without a mistake: they tell nothing."""
        _copy_sources()
        (COPY / "sitecustomize.py").write_text(_SITE)
        if compiled:
            self._configure()
            self.build()
        else:
            suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
            for name in (f"_C{suffix}", "_build_info.py"):
                shutil.copy2(ROOT / "lazyxla" / name, COPY / "lazyxla" / name)
        where = self._run([sys.executable, "-c", "import lazyxla; print(lazyxla.__file__)"]).stdout
        if not where.startswith(str(COPY)):
            raise SystemExit(f"the tests would import {where or 'nothing'}, not what is in {COPY}")

    @contextlib.contextmanager
    def broken(self, mutation: Mutation) -> Iterator[None]:
        """Within it the copy has the mistake. Raises CannotBuild."""
        path = COPY / mutation.path
        original = path.read_text()
        try:
            path.write_text(mutation.of(original))
            if self.compiled:
                self.build()
            yield
        finally:
            path.write_text(original)

    def build(self) -> None:
        built = self._run(["ninja", "-j", str(max(1, self.processes)), "-C", _BUILD])
        if built.returncode != 0:
            raise CannotBuild(built.stdout)

    def check(self, tests: list[str]) -> None:
        """Runs tests without a mistake, and leaves out from now on what fails."""
        for options, chosen, environment in _runs(tests, slow=False):
            result = self._pytest([*options, *chosen], environment)
            failing = _failures(result.stdout) if result else []
            self.failing += failing
            if result is None or (result.returncode not in (0, 5) and not failing):
                said = result.stdout if result else "they hang"
                raise SystemExit(f"the tests cannot run:\n{said}")

    def outcome(self, tests: list[str], slow: bool = False) -> Outcome:
        """What the fast ones of some tests say, or all with ``slow``, up to the first failure.

        Of files; a test that is named runs even if it is slow.
        """
        left_out = [f"--deselect={test}" for test in self.failing]
        for options, chosen, environment in _runs(tests, slow):
            result = self._pytest(["-x", *options, *left_out, *chosen], environment)
            if result is None:
                return Outcome(True, f"no end in {SECONDS} s")
            if result.returncode not in (0, 5):  # 5: all of them are slow
                return Outcome(True, next(iter(_failures(result.stdout)), "no test can run"))
        return Outcome(False, "")

    def _pytest(
        self, arguments: list[str], environment: dict[str, str]
    ) -> subprocess.CompletedProcess[str] | None:
        """None if it does not end."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
        run = [*command, "-n", str(self.processes), *arguments]
        try:
            return self._run(run, environment, seconds=SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def _configure(self) -> None:
        interpreter = f"-DPython_EXECUTABLE={sys.executable}"
        made = self._run(["cmake", "-S", ".", "-B", _BUILD, "-G", "Ninja", interpreter])
        if made.returncode != 0:
            raise SystemExit(f"cmake fails:\n{made.stdout}")

    def _run(
        self,
        command: list[str],
        own: dict[str, str] | None = None,
        seconds: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command in the copy. When it returns or raises, all that it started is ended."""
        tools = Path(sys.executable).parent
        environment = os.environ | {
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(COPY),
            # A mistake may be as long as what was there before, and made in the same second.
            "PYTHONDONTWRITEBYTECODE": "1",
            **(own or {}),
        }
        process = subprocess.Popen(
            command,
            cwd=COPY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except BaseException:
            process.terminate()  # ninja ends its compilers, which are no part of its group
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):  # also what a crashed test has left
                os.killpg(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(command, process.returncode, output)


def _runs(tests: list[str], slow: bool) -> list[tuple[list[str], list[str], dict[str, str]]]:
    """The options, tests and environment of each run of pytest that tests need."""
    fast = [] if slow else ["--slow", "0/1"]
    sharded = [test for test in tests if test.startswith(_SHARDED)]
    named = [test for test in tests if "::" in test and test not in sharded]
    files = [test for test in tests if test not in sharded and test not in named]
    runs = [(fast, files, {}), ([], sharded, _DEVICES), ([], named, {})]
    return [run for run in runs if run[1]]


def _copy_sources() -> None:
    """Writes what is not as it is in the working tree; the times of the others stay as they are."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    names = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    for name in names:
        content, copied = (ROOT / name).read_bytes(), COPY / name
        if not copied.exists() or copied.read_bytes() != content:
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(content)
    for room in ("csrc", "lazyxla", "tests"):
        for path in (COPY / room).rglob("*"):
            known = str(path.relative_to(COPY)) in names or path.name.startswith("_build_info")
            if path.suffix in (".cpp", ".h", ".py", ".pyi") and not known:
                path.unlink()


def _failures(output: str) -> list[str]:
    """The names of the tests that failed."""
    lines = [line.split(" ", 1) for line in output.splitlines()]
    return [
        rest[0].split(" - ")[0] for word, *rest in lines if word in ("FAILED", "ERROR") and rest
    ]
