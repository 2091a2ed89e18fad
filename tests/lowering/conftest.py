"""Shared by the tests of lowering."""

from __future__ import annotations

import pytest

from lazyxla.lowering import names, registry
from tests.lowering.bench import Bench


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    names()
    monkeypatch.setattr(registry, "_rules", dict(registry._rules))
    return Bench()
