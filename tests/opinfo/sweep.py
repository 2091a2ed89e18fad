"""Checks all entries in worker processes that may crash or hang: ``python -m tests.opinfo.sweep``.

The outcomes are added to a file, line by line, so that a sweep can be stopped and continued, and
made in shards; ``--docs`` brings docs/opinfo.md up to date: what it says of a dtype and part is
replaced where the results have these, and stays where they do not. ``--part sizes`` tries samples
with sizes of 0 and 1 instead, ``--part integers`` those with extreme integers, and ``--part views``
those as views of memory that the program makes; no page tells of these.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.opinfo.entries import entries, supports
from tests.opinfo.expected import unexpected
from tests.opinfo.outcome import PARTS, Outcome
from tests.opinfo.report import document, summary
from tests.worker_process import ROOT, WorkerProcess


class Worker:
    """A process that checks one task after the other; a new one after a crash, a timeout, or many
    programs.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        command = [sys.executable, "-m", "tests.opinfo.worker"]
        self._process = WorkerProcess(
            # The sweep is for the programs that are compiled.
            command,
            {"LAZYXLA_HOST_PROGRAMS": "0", **os.environ},
        )

    def check(self, entry: str, dtype: str, part: str, limit: int | None) -> Outcome:
        """Checks one entry, whatever happens."""
        if self._process.has_many_programs():
            self._process.stop()
        task = {"entry": entry, "dtype": dtype, "part": part, "limit": limit}
        try:
            line = self._process.ask(json.dumps(task), self.timeout)
        except TimeoutError:
            kind, message = "timeout", f"no result within {self.timeout:g} s"
        else:
            if line is not None:
                return Outcome(**json.loads(line))
            kind, message = "crash", f"the process ended with {self._process.end()}"
        outcome = Outcome(entry, dtype, part, limit=limit)
        outcome.fail(kind, message)
        return outcome

    def stop(self) -> None:
        """Ends the process."""
        self._process.stop()


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
