"""Writes the README's table of settings from lazyxla/config.py.

    python -m tests.settings_table

It takes the place of what stands between the two marks in README.md. test_settings.py checks that
it is up to date.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lazyxla.config import FIELDS, Field

FILE = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- begin: settings, by make docs -->\n", "<!-- end: settings -->\n"


def _row(field: Field[Any]) -> str:
    """As the environment has it: a bool is 0 or 1."""
    kind = type(field.default)
    default = str(int(field.default) if kind is bool else field.default)
    more = f"; [more]({field.page})" if field.page else ""
    cells = [
        f"`{field.variable}`",
        f"`{field.name}`",
        kind.__name__,
        f"`{default}`" if default else "",
        field.doc + more,
    ]
    return f"| {' | '.join(cells)} |\n".replace("|  |", "| |")


def table() -> str:
    """The table, with its marks."""
    head = "| Variable | Attribute | Type | Default | Meaning |\n|---|---|---|---|---|\n"
    return BEGIN + head + "".join(map(_row, FIELDS)) + END


def updated(text: str) -> str:
    """The README with the table as it should be. Raises ValueError if a mark is missing."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"no table between {BEGIN.strip()} and {END.strip()}")
    return before + table() + after


if __name__ == "__main__":
    FILE.write_text(updated(FILE.read_text()))
