"""Checks all entries in worker processes that may crash or hang: ``python -m tests.opinfo.sweep``.

The outcomes are added to a file, line by line, so that a sweep can be stopped and continued, and
made in shards; ``--docs`` brings docs/opinfo.md up to date: what it says of a dtype and part is
replaced where the results have these, and stays where they do not. ``--part sizes`` tries samples
with sizes of 0 and 1 instead; no page tells of these.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.opinfo.entries import entries, supports
from tests.opinfo.expected import unexpected
from tests.opinfo.outcome import PARTS, Outcome
from tests.opinfo.report import document, summary

ROOT = Path(__file__).resolve().parents[2]


_MOST_MAPPINGS = 30_000
"""A compiled program takes 18 memory mappings of its process, for good; Linux allows 65,530, and at
the last one XLA's compiler crashes. An entry may take 26,000."""


class Worker:
    """A process that checks one task after the other; a new one after a crash, a timeout, or many
    programs.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._process: subprocess.Popen[str] | None = None
        self._log = open(os.devnull, "w")  # noqa: SIM115

    def check(self, entry: str, dtype: str, part: str, limit: int | None) -> Outcome:
        """Checks one entry, whatever happens."""
        if self._process is not None and _mappings(self._process.pid) > _MOST_MAPPINGS:
            self.stop()
        process = self._start()
        assert process.stdin is not None
        task = {"entry": entry, "dtype": dtype, "part": part, "limit": limit}
        try:
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            line = self._lines.get(timeout=self.timeout)
        except queue.Empty:
            self.stop()
            kind, message = "timeout", f"no result within {self.timeout:g} s"
        except OSError:
            line = None
        else:
            kind = ""
        if not kind and line is not None:
            return Outcome(**json.loads(line))
        if not kind:
            kind, message = "crash", f"the process ended with {process.wait()}"
            self.stop()
        outcome = Outcome(entry, dtype, part, limit=limit)
        outcome.fail(kind, message)
        return outcome

    def stop(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        if self._process is not None:
            return self._process
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.opinfo.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env={"LAZYXLA_PLATFORM": "cpu", **os.environ, "PYTHONPATH": paths},
        )
        self._process = process
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(process.stdout, self._lines), daemon=True).start()
        return process


def _mappings(process: int) -> int:
    """How many memory mappings a process has; 0 if it has ended."""
    try:
        return Path(f"/proc/{process}/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


def _read(stream: Iterable[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def tasks(
    names: list[str], dtypes: list[str], parts: list[str], shard: tuple[int, int]
) -> Iterator[tuple[str, str, str]]:
    """(entry, dtype, part) of all that PyTorch's CPU has, of one shard."""
    for name in [n for i, n in enumerate(names) if i % shard[1] == shard[0]]:
        for dtype in dtypes:
            for part in parts:
                if supports(entries()[name], getattr(torch, dtype), part):
                    yield name, dtype, part


def load(*paths: Path) -> list[Outcome]:
    """The outcomes in files, the last of each task."""
    found: dict[tuple[str, str, str], Outcome] = {}
    for path in paths:
        for line in path.read_text().splitlines() if path.exists() else ():
            outcome = Outcome(**json.loads(line))
            found[outcome.entry, outcome.dtype, outcome.part] = outcome
    return list(found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32", help="one or several, with commas")
    parser.add_argument("--part", default=",".join(PARTS), help="one or several, with commas")
    parser.add_argument("--entry", default="", help="only these entries, with commas")
    parser.add_argument("--limit", type=int, help="samples per entry (default: all)")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th entry, from the i-th")
    parser.add_argument("--jobs", type=int, default=1, help="processes that check at a time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds per entry and part")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "opinfo.jsonl")
    parser.add_argument("--resume", action="store_true", help="leave out what the file has already")
    parser.add_argument("--docs", action="store_true", help="update docs/opinfo.md at the end")
    parser.add_argument(
        "--earlier", type=Path, nargs="+", default=[], help="results for --docs from other files"
    )
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args()
    problems = 0 if options.report else run(options)
    if options.docs:
        page = ROOT / "docs" / "opinfo.md"
        outcomes = [o for o in load(*options.earlier, options.results) if o.part in PARTS]
        page.write_text(document(outcomes, page.read_text() if page.exists() else ""))
    return int(problems > 0)


def check_all(
    todo: Iterable[tuple[str, str, str]], jobs: int, timeout: float, limit: int | None
) -> Iterator[Outcome]:
    """The outcomes in the order of the tasks, of which `jobs` are checked at a time."""
    workers = [Worker(timeout) for _ in range(jobs)]
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def check(task: tuple[str, str, str]) -> Outcome:
        worker = idle.get()
        try:
            return worker.check(*task, limit)
        finally:
            idle.put(worker)

    pool = ThreadPoolExecutor(jobs)
    try:
        yield from pool.map(check, todo)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.stop()


def run(options: argparse.Namespace) -> int:
    """Checks what the options say. Returns the number of unexpected failures and passes."""
    index, count = map(int, options.shard.split("/"))
    wanted = [n for n in options.entry.split(",") if n] or list(entries())
    done = {(o.entry, o.dtype, o.part) for o in load(options.results)} if options.resume else set()
    start = time.monotonic()
    outcomes: list[Outcome] = []
    problems = 0
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with options.results.open("a") as results:
        dtypes, parts = options.dtype.split(","), options.part.split(",")
        todo = [t for t in tasks(wanted, dtypes, parts, (index, count)) if t not in done]
        for outcome in check_all(todo, options.jobs, options.timeout, options.limit):
            outcomes.append(outcome)
            results.write(json.dumps(outcome.as_json()) + "\n")
            results.flush()
            found = unexpected(outcome, complete=options.limit is None)
            problems += len(found)
            for problem in found[:1]:
                print(" ".join(problem.split())[:200], flush=True)
    print(summary(outcomes), f"{time.monotonic() - start:.0f} s", sep="\n")
    return problems


if __name__ == "__main__":
    sys.exit(main())
