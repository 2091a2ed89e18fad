"""Tables of outcomes."""

from __future__ import annotations

import itertools
from collections import Counter

from tests.opinfo.expected import EXPECTED, JUDGED
from tests.opinfo.outcome import PARTS, Outcome

_HEADS = ("| dtype | part | tried per entry |", "| Entry | dtype |")
_ORDER = (
    *("float32", "bfloat16", "float16", "float64", "complex64"),
    *("int64", "int32", "uint8", "bool"),
)

# Numbers by dtype, part and what was tried; cells by entry and dtype, of all parts and the host.
_Rows = dict[tuple[str, str, str], tuple[int, ...]]
_Cells = dict[tuple[str, str], list[str]]


def summary(outcomes: list[Outcome]) -> str:
    """One line per dtype, part and limit of samples, as a Markdown table."""
    return "\n".join(_summary(_rows(outcomes)))


def _summary(rows: _Rows) -> list[str]:
    lines = [
        f"{_HEADS[0]} entries | samples | all pass | failed | crashed "
        "| samples judged by double precision | with host operators |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    return lines + [f"| {' | '.join(map(str, (*key, *rows[key])))} |" for key in rows]


def _rows(outcomes: list[Outcome]) -> _Rows:
    rows: _Rows = {}
    for dtype, part, limit in dict.fromkeys((o.dtype, o.part, o.limit) for o in outcomes):
        group = [o for o in outcomes if (o.dtype, o.part, o.limit) == (dtype, part, limit)]
        crashed = sum(o.crashed for o in group)
        rows[dtype, part, _tried(limit)] = (
            len(group),
            sum(o.samples for o in group),
            sum(o.passed for o in group),
            sum(not o.passed for o in group) - crashed,
            crashed,
            sum(o.as_exact for o in group),
            sum(bool(o.fallbacks) for o in group),
        )
    return rows


def _cells(outcomes: list[Outcome]) -> _Cells:
    """Of the entries that do not pass, or use the host."""
    named = {(o.entry, o.dtype) for o in outcomes if o.fallbacks or not o.passed}
    cells: _Cells = {}
    for key in named:
        group = {o.part: o for o in outcomes if (o.entry, o.dtype) == key}
        host = sorted({name for o in group.values() for name in o.fallbacks})
        parts = [_cell(group[part]) if part in group else "" for part in PARTS]
        cells[key] = [*parts, _names(tuple(host))]
    return cells


def _table(page: str, head: str) -> list[list[str]]:
    """The cells of the rows of a page's table, or nothing."""
    lines = page.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith(head)), len(lines)) + 2
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[first:])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def _merge(page: str, outcomes: list[Outcome]) -> tuple[_Rows, _Cells]:
    """The rows and cells of the outcomes, and those of a page for the dtypes and parts they lack.

    The page's operators on the host stay as long as it tells of a part of their dtype that is not
    among the outcomes.
    """
    rows, cells = _rows(outcomes), _cells(outcomes)
    new = {(o.dtype, o.part) for o in outcomes}
    tasks = {(o.entry, o.dtype, o.part): o for o in outcomes}
    kept: set[str] = set()
    for dtype, part, tried, *numbers in _table(page, _HEADS[0]):
        if (dtype, part) not in new:
            rows[dtype, part, tried] = tuple(map(int, numbers))
            kept.add(dtype)
    for entry, dtype, *old in _table(page, _HEADS[1]):
        parts = [
            _cell(tasks[task])
            if (task := (entry, dtype, part)) in tasks
            # What the page tells of this part is outdated.
            else ""
            if (dtype, part) in new
            else cell
            for part, cell in zip(PARTS, old)
        ]
        ours = cells.get((entry, dtype), [""])[-1].split(", ")
        theirs = old[-1].split(", ") if dtype in kept else []
        host = _names(tuple(sorted({name.strip("`") for name in (*ours, *theirs) if name})))
        if host or not set(parts) <= {"", "pass"}:
            cells[entry, dtype] = [*parts, host]
    return {key: rows[key] for key in sorted(rows, key=_place)}, cells


def _place(key: tuple[str, str, str]) -> tuple[int, str, int, str]:
    dtype, part, tried = key
    return _ORDER.index(dtype) if dtype in _ORDER else len(_ORDER), dtype, PARTS.index(part), tried


def _entries(rows: _Rows) -> int:
    """How many entries, each in each of its dtypes, the rows tell of."""
    counts: Counter[tuple[str, str]] = Counter()
    for (dtype, part, _), numbers in rows.items():
        counts[dtype, part] += numbers[0]
    return sum(
        max(count for (d, _), count in counts.items() if d == dtype)
        for dtype in {dtype for dtype, _ in counts}
    )


def document(outcomes: list[Outcome], page: str = "") -> str:
    """docs/opinfo.md. Of dtypes and parts without outcomes, it says what the earlier page does."""
    rows, cells = _merge(page, outcomes)
    hosts = Counter(
        name.strip("`") for row in cells.values() for name in row[-1].split(", ") if name
    )
    entries, on_host = _entries(rows), sum(bool(row[-1]) for row in cells.values())
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
        *_summary(rows),
        "",
        f"{on_host} of {entries} entries ({on_host / max(entries, 1):.1%}), each counted once per",
        "dtype, used the host in one of their samples, for these operators:",
        "",
        "| Operator on the host | entries that used it |",
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
        "A number is that of failed samples among those tried. A part left empty passes, or the",
        "entry has none; all other entries pass without the host.",
        "",
        f"{_HEADS[1]} " + " | ".join(PARTS) + " | on the host |",
        "|---|---|" + "---|" * (len(PARTS) + 1),
    ]
    lines += [f"| {' | '.join((*key, *cells[key]))} |" for key in sorted(cells)]
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
