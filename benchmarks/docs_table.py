"""The table of current figures in docs/performance.md.

    python benchmarks/run.py --write-docs       # measures, and puts the figures into the table
    python benchmarks/modes.py --write-docs     # the same for the modes
    python benchmarks/docs_table.py             # writes the table anew from results.json

`results.json` keeps the figures that the table shows, each with the machine that it was measured
on. A run replaces the figures of the benchmarks that it measured, all others stay.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
PAGE = HERE.parent / "docs" / "performance.md"
BEGIN = "<!-- begin: figures, by python benchmarks/docs_table.py -->\n"
END = "<!-- end: figures -->\n"

# Of these, the table has the geometric means of all models only.
MEANS_ONLY = ("first call, s", "import and first call, s")


@dataclass
class Figure:
    """One line of the table. ``bar`` is the most that the figure itself may be, if it has one."""

    benchmark: str
    measure: str
    lazyxla: float
    peer: str = ""
    peer_value: float | None = None
    bar: float | None = None
    machine: str = ""
    group: str = ""
    """What it belongs to on the command line."""

    @property
    def ratio(self) -> float | None:
        return self.lazyxla / self.peer_value if self.peer_value else None


def machine(device: str = "cpu") -> str:
    """What is measured on: the processor and how many CPUs this process may use, or the GPU."""
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.check_output(query, text=True).splitlines()[0]
    info = Path("/proc/cpuinfo").read_text()
    found = re.search(r"^model name\s*: (.*)$", info, re.MULTILINE)
    name = found[1].strip() if found else "unknown processor"
    without = "" if "avx512f" in info else " without AVX-512"
    return f"{name}{without}, {len(os.sched_getaffinity(0))} CPUs"


def read() -> list[Figure]:
    """The figures that are kept."""
    return [Figure(**row) for row in json.loads(RESULTS.read_text())]


def merged(known: Iterable[Figure], new: Iterable[Figure]) -> list[Figure]:
    """The known figures, with the new ones in place of those of the same benchmarks."""
    known, new = list(known), [figure for figure in new if figure.measure not in MEANS_ONLY]
    groups = list(dict.fromkeys(figure.group for figure in [*known, *new]))
    replaced = {(figure.group, figure.benchmark) for figure in new}
    kept = [figure for figure in known if (figure.group, figure.benchmark) not in replaced]
    return sorted([*kept, *new], key=lambda figure: groups.index(figure.group))


def number(value: float | None) -> str:
    """Three significant digits, so far as that makes sense."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def line(figure: Figure) -> str:
    """A row of the table."""
    is_ratio = figure.measure.endswith(": ratio")  # a mean of them
    against = figure.peer
    if figure.bar is not None:
        verdict = "met" if figure.lazyxla <= figure.bar else "**missed**"
        against = f"bar: at most {figure.bar:g}, {verdict}"
    cells = [
        f"`{figure.group}`",
        figure.benchmark if figure.benchmark != figure.group else "",
        re.sub(r"\bus\b", "µs", figure.measure).removesuffix(": ratio"),
        number(None if is_ratio else figure.lazyxla),
        number(figure.peer_value),
        number(figure.lazyxla if is_ratio else figure.ratio),
        against,
        figure.machine,
    ]
    return f"| {' | '.join(cells)} |\n".replace("|  |", "| |").replace("|  |", "| |")


def table(figures: Iterable[Figure]) -> str:
    """The table, with its marks."""
    head = "| Benchmark | | Measure | lazyxla | peer | ratio | peer, or bar | processor |\n"
    return BEGIN + head + "|---|---|---|---|---|---|---|---|\n" + "".join(map(line, figures)) + END


def updated(text: str) -> str:
    """The page with the table as it should be. Raises ValueError if a mark is missing."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"no table between {BEGIN.strip()} and {END.strip()}")
    return before + table(read()) + after


def write(new: Iterable[Figure] = ()) -> None:
    """Puts figures into results.json, and the table into the page."""
    rows = [dataclasses.asdict(figure) for figure in merged(read(), new)]
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    PAGE.write_text(updated(PAGE.read_text()))


if __name__ == "__main__":
    write()
