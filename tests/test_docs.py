"""Snippets in docs/ run as they stand, those of a page or a section in order in one process."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT, RunPython
from tests.support import needs_libtpu


@pytest.mark.parametrize(
    ("page", "section"),
    [
        ("custom_operators.md", ""),
        ("jax.md", ""),
        ("input.md", "## Batches of few sizes\n"),
        ("input.md", "## torch.compile pads by itself\n"),
        ("distributed.md", "# One process, many devices\n"),
        pytest.param("scaling.md", "", marks=needs_libtpu),
        ("distributed.md", "## PyTorch's plans\n"),
        ("distributed.md", "## Sequence and expert parallelism\n"),
        ("distributed.md", "## Deep models\n"),
    ],
)
def test_snippets(page: str, section: str, run_python: RunPython) -> None:
    text = (ROOT / "docs" / page).read_text()
    if section:
        assert section in text
        text = text.split(section)[1].split("\n## ")[0]
    snippets = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert snippets
    run_python("\n".join(snippets), LAZYXLA_CPU_DEVICES="4")
