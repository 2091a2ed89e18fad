"""The failures that are known: known_failures.txt, and the comparison with what happened.

The text has a reason in each line that is not indented, and below it, indented, a file and a
pattern of tests (as in fnmatch) per line. Every test that a pattern matches must fail, and every
failure must be matched. A reason that starts with "slow" tells of time: such tests may pass where
the machine is fast enough, but must not fail otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

KNOWN_FAILURES = Path(__file__).with_name("known_failures.txt")


@dataclass(frozen=True)
class Outcome:
    """Of one test. The kind is passed, skipped, failed, crashed or timeout."""

    file: str
    test: str
    kind: str
    message: str = ""
    seconds: float = 0.0

    @property
    def bad(self) -> bool:
        return self.kind not in ("passed", "skipped")


@dataclass(frozen=True)
class Known:
    """Tests of a file that are known to fail."""

    reason: str
    file: str
    pattern: str

    def matches(self, outcome: Outcome) -> bool:
        return self.file == outcome.file and fnmatchcase(outcome.test, self.pattern)

    @property
    def slow(self) -> bool:
        return self.reason.startswith("slow")


def load(path: Path = KNOWN_FAILURES) -> list[Known]:
    """The known failures of a text."""
    found, reason = [], ""
    for line in path.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if not line.startswith(" "):
            reason = line.strip()
            continue
        file, pattern = line.split()
        found.append(Known(reason, file, pattern))
    return found


def reason_of(outcome: Outcome, known: Iterable[Known]) -> str | None:
    """Why a test fails, if that is known."""
    return next((k.reason for k in known if k.matches(outcome)), None)


def problems(outcomes: Iterable[Outcome], known: list[Known], complete: bool) -> list[str]:
    """Failures that are not known and known ones that did not happen.

    `complete`: the outcomes are all tests of their files, so that each pattern has to match one.
    """
    found, used, files = [], set(), set()
    for outcome in outcomes:
        files.add(outcome.file)
        if outcome.kind == "skipped":
            continue
        matching = [k for k in known if k.matches(outcome)]
        used.update(matching)
        name = f"{outcome.file} {outcome.test}"
        if outcome.bad and not matching:
            found.append(f"{outcome.kind}: {name}: {_error(outcome.message)[:200]}")
        elif matching and all(k.slow for k in matching):
            if outcome.bad and outcome.kind != "timeout":
                found.append(f"{outcome.kind}, though known to be only slow: {name}")
        elif matching and not outcome.bad:
            found.append(f"passes, though a known failure: {name}")
    if complete:
        unused = [k for k in known if k.file in files and k not in used]
        found += [f"no test runs: {k.file} {k.pattern}" for k in unused]
    return found


def _error(traceback: str) -> str:
    """The line of a traceback that names the error."""
    lines = traceback.strip().splitlines() or [""]
    return next((line for line in reversed(lines) if re.match(r"\w+(\.\w+)*: ", line)), lines[-1])


def summary(outcomes: Iterable[Outcome], known: list[Known]) -> str:
    """A Markdown table of the files, and one of the known failures by reason."""
    kinds = ("passed", "skipped", "failed", "crashed", "timeout")
    files: dict[str, dict[str, int]] = {}
    reasons: dict[str, int] = {}
    for outcome in outcomes:
        counts = files.setdefault(outcome.file, dict.fromkeys((*kinds, "known"), 0))
        counts[outcome.kind] += 1
        if outcome.bad:
            reason = reason_of(outcome, known)
            counts["known"] += reason is not None
            if reason is not None:
                reasons[reason] = reasons.get(reason, 0) + 1
    lines = [
        "| file | run | passed | failed | crashed | timed out | of these known | skipped |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for file, counts in files.items():
        ran = sum(counts[k] for k in kinds) - counts["skipped"]
        cells = (ran, *(counts[k] for k in ("passed", "failed", "crashed", "timeout", "known")))
        lines.append(f"| {file} | {' | '.join(map(str, cells))} | {counts['skipped']} |")
    lines += ["", "| reason | tests |", "|---|---|"]
    by_count = sorted(reasons.items(), key=lambda item: -item[1])
    return "\n".join(lines + [f"| {reason} | {count} |" for reason, count in by_count])
