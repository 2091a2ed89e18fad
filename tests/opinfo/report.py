"""Tables of outcomes."""

from __future__ import annotations

from collections import Counter

from tests.opinfo.expected import EXPECTED, JUDGED
from tests.opinfo.outcome import PARTS, Outcome


def summary(outcomes: list[Outcome]) -> str:
    """One line per dtype, part and limit of samples, as a Markdown table."""
    lines = [
        "| dtype | part | tried per entry | entries | samples | all pass | failed | crashed "
        "| samples judged by double precision | with host operators |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for dtype, part, limit in dict.fromkeys((o.dtype, o.part, o.limit) for o in outcomes):
        group = [o for o in outcomes if (o.dtype, o.part, o.limit) == (dtype, part, limit)]
        crashed = sum(o.crashed for o in group)
        numbers = (
            len(group),
            sum(o.samples for o in group),
            sum(o.passed for o in group),
            sum(not o.passed for o in group) - crashed,
            crashed,
            sum(o.as_exact for o in group),
            sum(bool(o.fallbacks) for o in group),
        )
        lines.append(
            f"| {dtype} | {part} | {_tried(limit)} | " + " | ".join(map(str, numbers)) + " |"
        )
    return "\n".join(lines)


def document(outcomes: list[Outcome]) -> str:
    """docs/opinfo.md"""
    hosts: Counter[str] = Counter()
    for o in outcomes:
        hosts.update(set(o.fallbacks))
    entries = len({(o.entry, o.dtype) for o in outcomes})
    on_host = len({(o.entry, o.dtype) for o in outcomes if o.fallbacks})
    lines = [
        "# Operator coverage",
        "",
        "Written by `make test-opinfo`: samples of PyTorch's operator table (OpInfo) on the",
        "device, compared with the CPU at PyTorch's default tolerances, or those that the entry",
        "declares. Shapes, dtypes and, of forward results, strides are compared, too; random and",
        "uninitialised results in these only. Of the entries named below, a sample beyond the",
        "tolerances passes if its error, measured against the CPU in double precision, is at most",
        "twice the CPU's own greatest one. Layouts are forward samples with floating-point tensors",
        "that are not contiguous, and with those of four dimensions as channels_last. All on the",
        "CPU platform.",
        "",
        summary(outcomes),
        "",
        f"{on_host} of {entries} entries ({on_host / max(entries, 1):.1%}) used the host in one of",
        "their samples, for these operators:",
        "",
        "| Operator on the host | checks that used it |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {count} |" for name, count in sorted(hosts.items())]
    lines += ["", "## Known failures", "", "| Reason | Entries |", "|---|---|"]
    lines += [f"| {e.reason} | {_names(e.entries)} |" for e in EXPECTED]
    lines += ["", "## Entries that double precision judges", ""]
    lines += ["| Reason | dtypes | parts | Entries |", "|---|---|---|---|"]
    lines += [
        f"| {j.reason} | {', '.join(j.dtypes)} | {', '.join(j.parts)} | {_names(j.entries)} |"
        for j in JUDGED
    ]
    lines += [
        "",
        "## Entries that do not pass, or use the host",
        "",
        "A number is that of failed samples among those tried; all other entries pass without the",
        "host.",
        "",
        "| Entry | dtype | " + " | ".join(PARTS) + " | on the host |",
        "|---|---|" + "---|" * (len(PARTS) + 1),
    ]
    for entry, dtype in sorted({(o.entry, o.dtype) for o in outcomes}):
        group = {o.part: o for o in outcomes if (o.entry, o.dtype) == (entry, dtype)}
        host = sorted({name for o in group.values() for name in o.fallbacks})
        if host or not all(o.passed for o in group.values()):
            cells = [_cell(group[part]) if part in group else "" for part in PARTS]
            lines.append(f"| {entry} | {dtype} | {' | '.join(cells)} | {_names(tuple(host))} |")
    return "\n".join(lines) + "\n"


def _tried(limit: int | None) -> str:
    return "all samples" if limit is None else f"the first {limit}"


def _cell(outcome: Outcome) -> str:
    if outcome.passed:
        return "pass" if outcome.samples else ""
    kinds = sorted({f["kind"] for f in outcome.failures})
    if outcome.crashed:
        return ", ".join(kinds)
    return f"{len(outcome.failures)}/{outcome.samples}: {', '.join(kinds)}"


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{n}`" for n in names)
