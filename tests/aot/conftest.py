"""Shared by the tests of programs that are compiled for devices that are not there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import lazyxla

# Counters of what reaches a device, or the caches of programs that do.
_EFFECTS = ("flushes", "lowerings", "compiles", "cache_hits", "executions", "uploads", "downloads")


@pytest.fixture
def nothing_happens() -> Iterator[None]:
    """Whatever these tests do, no device is used."""
    lazyxla.sync(wait=True)
    before = lazyxla.counters()
    programs = lazyxla._C.cached_programs()
    yield
    after = lazyxla.counters()
    assert {k: after[k] - before[k] for k in _EFFECTS} == dict.fromkeys(_EFFECTS, 0)
    assert lazyxla._C.cached_programs() == programs
    assert lazyxla._C.captured_platform() == ""
