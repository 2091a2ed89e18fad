"""No program grows with the sizes of a call's arguments: every entry of PyTorch's table."""

from __future__ import annotations

import pytest

from tests.opinfo.entries import entries
from tests.opinfo.program_sizes import growing

_UNROLLED = "PyTorch's composite function calls operators in a loop"
GROW = {
    "diff": _UNROLLED + ", one for each order",
    "nn.functional.linear_cross_entropy.chunked": _UNROLLED + " over chunks of the caller's size",
    "nn.functional.linear_cross_entropy.chunked_none": _UNROLLED + ", likewise",
    "linalg.householder_product": "PyTorch's gradient is a loop over reflectors",
    "ormqr": "PyTorch's gradient is a loop over reflectors",
}
"""Entries whose programs grow, and why."""

_SHARDS = 16


@pytest.mark.parametrize("shard", range(_SHARDS))
def test_no_program_grows(shard: int) -> None:
    found, lowered = {}, 0
    for name in list(entries())[shard::_SHARDS]:
        if name not in GROW:
            grow, count = growing(entries()[name])
            lowered += count
            if grow:
                found[name] = grow
    assert not found
    assert lowered > 100


@pytest.mark.parametrize("name", GROW)
def test_what_grows(name: str) -> None:
    """If it fails, take the entry off the list."""
    assert growing(entries()[name], factors=(2, 10))[0]
