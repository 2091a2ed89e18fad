"""Tables of outcomes."""

from __future__ import annotations

from collections import Counter

from tests.opinfo.outcome import Outcome


def summary(outcomes: list[Outcome]) -> str:
    """One line per dtype and part, as a Markdown table."""
    lines = [
        "| dtype | part | entries | samples | all pass | failed | crashed | with host operators |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for dtype, part in dict.fromkeys((o.dtype, o.part) for o in outcomes):
        group = [o for o in outcomes if (o.dtype, o.part) == (dtype, part)]
        crashed = sum(o.crashed for o in group)
        numbers = (
            len(group),
            sum(o.samples for o in group),
            sum(o.passed for o in group),
            sum(not o.passed for o in group) - crashed,
            crashed,
            sum(bool(o.fallbacks) for o in group),
        )
        lines.append(f"| {dtype} | {part} | " + " | ".join(map(str, numbers)) + " |")
    return "\n".join(lines)


def document(outcomes: list[Outcome]) -> str:
    """docs/opinfo.md"""
    raise NotImplementedError
