"""Failures that are known, each with its reason. A check that passes nevertheless is a failure.

Reasons are facts that were measured; a failure that nobody has looked into does not belong here.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.opinfo.outcome import Outcome


@dataclass(frozen=True)
class Expected:
    """Of these entries, in these parts and dtypes, failures of one of these kinds."""

    reason: str
    entries: tuple[str, ...]
    kinds: tuple[str, ...]
    parts: tuple[str, ...] = ("forward",)
    dtypes: tuple[str, ...] = ("float32",)


EXPECTED: tuple[Expected, ...] = ()


def expected(entry: str, dtype: str, part: str) -> list[Expected]:
    """What is known about a check."""
    return [e for e in EXPECTED if entry in e.entries and part in e.parts and dtype in e.dtypes]


def unexpected(outcome: Outcome, complete: bool) -> list[str]:
    """Failures that are not known, and known ones that do not happen any more.

    The latter only if the check was `complete`, that is, of all samples.
    """
    known = expected(outcome.entry, outcome.dtype, outcome.part)
    problems = [
        f"{outcome.entry} {outcome.part} sample {f['sample']}: {f['kind']}: {f['message']}"
        for f in outcome.failures
        if not any(f["kind"] in e.kinds for e in known)
    ]
    for e in known if complete else []:
        if not any(f["kind"] in e.kinds for f in outcome.failures):
            problems.append(
                f"{outcome.entry} {outcome.part} passes, but is expected to fail: {e.reason}"
            )
    return problems
