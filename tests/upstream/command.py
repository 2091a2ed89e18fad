"""The command that runs a suite of PyTorch's own tests on the device.

The outcomes are added to a file, line by line, so that a run can be stopped and continued
(``--resume``) and made in shards. The command fails if a test fails that the suite's known failures
do not name, or one that they name does not fail.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from tests.upstream.known import Outcome, load, problems, summary
from tests.upstream.process import Worker
from tests.upstream.source import tests_of_pytorch
from tests.worker_process import ROOT

CACHE = ROOT / "build" / "upstream"


class StartsWorker(Protocol):
    def __call__(
        self, directory: Path, file: str, cache: Path, *, device: str = ..., mode: str = ...
    ) -> Worker: ...


@dataclass(frozen=True)
class Suite:
    """Files of tests, below the directory test/ of PyTorch's source or a folder of it."""

    files: tuple[str, ...]
    known_failures: Path
    results: str
    mode: str
    start: StartsWorker
    folder: str = "."


def main(suite: Suite, **others: Suite) -> int:
    """`others`: of the same files, run in another way that the option of that name asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.set_defaults(suite=suite)
    for name, other in others.items():
        parser.add_argument(f"--{name}", dest="suite", action="store_const", const=other)
    parser.add_argument(
        "--files", default=",".join(suite.files), help="one or several, with commas"
    )
    parser.add_argument("--tests", default="*", help="a pattern of names, such as '*unsqueeze*'")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th test, from the i-th")
    parser.add_argument("--mode", default=suite.mode, choices=["lazy", "eager", "fused"])
    parser.add_argument("--timeout", type=float, default=120, help="seconds per test")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--resume", action="store_true", help="leave out what the file has already")
    parser.add_argument("--again", action="store_true", help="only what failed in that file")
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="run on PyTorch's CPU what failed in that file: what fails there, too, is no fault of "
        "the device's",
    )
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--source", type=Path, help="the directory test/ of PyTorch's source")
    options = parser.parse_args()
    suite = options.suite
    options.results = options.results or CACHE / suite.results
    options.results.parent.mkdir(parents=True, exist_ok=True)
    files = options.files.split(",")
    if options.cpu:
        run_on_cpu(suite, options, files)
        return 0
    if not options.report:
        run(suite, options, files)
    outcomes = [o for o in _load(options.results) if o.file in files]
    known = load(suite.known_failures)
    complete = options.tests == "*" and options.shard == "0/1"
    found = problems(outcomes, known, complete)
    print(*found, "", summary(outcomes, known), sep="\n")
    return int(bool(found))


def run(suite: Suite, options: argparse.Namespace, files: list[str]) -> None:
    """Runs the tests that the options name, and adds their outcomes to the file."""
    directory = (options.source or tests_of_pytorch(CACHE)) / suite.folder
    before = {(o.file, o.test): o for o in _load(options.results)}
    index, count = map(int, options.shard.split("/"))
    with options.results.open("a") as results:
        for file in files:
            start = time.monotonic()
            worker = suite.start(directory, file, CACHE / "programs", mode=options.mode)
            for test in worker.tests[index::count]:
                earlier = before.get((file, test))
                done = options.resume and earlier is not None
                fine = options.again and (earlier is None or not earlier.bad)
                if done or fine or not fnmatchcase(test, options.tests):
                    continue
                outcome = Outcome(file, test, **worker.run(test, options.timeout))
                results.write(json.dumps(asdict(outcome)) + "\n")
                results.flush()
                if outcome.bad:
                    print(_line(outcome), flush=True)
            worker.stop()
            print(f"{file}: {time.monotonic() - start:.0f} s", flush=True)


def run_on_cpu(suite: Suite, options: argparse.Namespace, files: list[str]) -> None:
    """Prints which of the tests that failed fail on PyTorch's CPU, too."""
    directory = (options.source or tests_of_pytorch(CACHE)) / suite.folder
    for file in files:
        failed = [o.test for o in _load(options.results) if o.bad and o.file == file]
        if not failed:
            continue
        try:
            worker = suite.start(directory, file, CACHE / "programs", device="cpu")
        except RuntimeError as error:  # some files cannot have the CPU for their device
            print(error, flush=True)
            continue
        for name in failed:
            test = name.replace("_lazyxla", "_cpu")
            if test in worker.tests and fnmatchcase(name, options.tests):
                outcome = Outcome(file, test, **worker.run(test, options.timeout))
                if outcome.bad:
                    print(_line(outcome), flush=True)
        worker.stop()


def _line(outcome: Outcome) -> str:
    return f"{outcome.kind}: {outcome.file} {outcome.test}"


def _load(path: Path) -> list[Outcome]:
    """The outcomes in a file, the last of each test."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [Outcome(**json.loads(line)) for line in lines]
    return list({(o.file, o.test): o for o in found}.values())
