"""docs/performance.md has the table that benchmarks/docs_table.py makes of results.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import docs_table
from benchmarks.docs_table import Figure


def test_the_page_is_up_to_date() -> None:
    page = docs_table.PAGE.read_text()
    assert docs_table.updated(page) == page, "python benchmarks/docs_table.py writes it anew"


def test_a_run_replaces_its_own_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    old = [
        Figure("decoder", "step, ms", 2.0, "PyTorch eager", 4.0, machine="a", group="decoder"),
        Figure("chain", "lazy, us/op", 1.0, machine="a", group="modes"),
        Figure("decoder", "eager, ms per step", 3.0, machine="a", group="modes"),
    ]
    results.write_text(json.dumps([vars(figure) for figure in old]))
    page.write_text("before\n" + docs_table.BEGIN + "old\n" + docs_table.END + "after\n")
    monkeypatch.setattr(docs_table, "RESULTS", results)
    monkeypatch.setattr(docs_table, "PAGE", page)
    docs_table.write(
        [
            Figure("decoder", "eager, ms per step", 1.5, machine="b", group="modes"),
            Figure("geomean", "latency, ms: ratio", 0.8, "x", machine="b", group="inference"),
            Figure("alexnet", "first call, s", 5.0, machine="b", group="inference"),
        ]
    )
    assert page.read_text().splitlines() == [
        "before",
        docs_table.BEGIN.strip(),
        "| Benchmark | | Measure | lazyxla | peer | ratio | peer, or bar | processor |",
        "|---|---|---|---|---|---|---|---|",
        "| `decoder` | | step, ms | 2.00 | 4.00 | 0.50 | PyTorch eager | a |",
        "| `modes` | chain | lazy, µs/op | 1.00 | | | | a |",
        "| `modes` | decoder | eager, ms per step | 1.50 | | | | b |",
        "| `inference` | geomean | latency, ms | | | 0.80 | x | b |",
        docs_table.END.strip(),
        "after",
    ]


def test_figures_of_the_page_have_a_machine() -> None:
    assert [figure for figure in docs_table.read() if not figure.machine or not figure.group] == []
