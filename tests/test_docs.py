"""The snippets in docs/ run as they stand, each page's in their order in one process."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT, RunPython


@pytest.mark.parametrize("page", ["custom_operators.md"])
def test_snippets(page: str, run_python: RunPython) -> None:
    text = (ROOT / "docs" / page).read_text()
    snippets = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert snippets
    run_python("\n".join(snippets))
