"""benchmarks/compiled_kernels.py: what it counts of programs without and with a kernel."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import needs_libtpu

pytestmark = needs_libtpu

TOPOLOGY = "v5e:1x1"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    directory = Path(__file__).resolve().parents[2] / "benchmarks"
    monkeypatch.setattr(sys, "path", [str(directory), *sys.path])
    yield importlib.import_module("compiled_kernels")
    for name in ("compiled_kernels", "memory_traffic"):
        del sys.modules[name]


def test_a_program_that_moves_the_least(kernels: Any) -> None:
    x = kernels.meta(4096, 1024)
    row = kernels.measure(kernels.Case("", "", lambda x: x + 1, (x,), 2 * x.nbytes), TOPOLOGY)
    assert row.moved == row.case.least
    assert row.kernels == 0
    assert row.seconds == row.cycles / row.clock > 0


def test_slices_count_as_what_they_read(kernels: Any) -> None:
    x = kernels.meta(8192, 4096)
    row = kernels.measure(kernels.Case("", "", lambda x: x[:, 1024:2048].sin(), (x,)), TOPOLOGY)
    assert row.moved == 2 * x.nbytes // 4


def test_a_kernel_beside_plain_xla(kernels: Any) -> None:
    """Rotary positions: the kernel moves the least there is and says so."""
    x, table = kernels.meta(2, 8, 1024, 128), kernels.meta(2, 1024, 128)
    inputs, least = (x, x, table, table), 4 * x.nbytes + 2 * table.nbytes
    ours, plain = (
        kernels.measure(kernels.Case("", how, call, inputs, least), TOPOLOGY)
        for how, call in reversed(kernels.ROTATIONS.items())
    )
    assert (ours.kernels, plain.kernels) == (2, 0)
    # The angles are read twice, once for each.
    said = (least + 2 * table.nbytes) / 819e9
    assert ours.kernel_seconds == pytest.approx(said)
    assert ours.moved <= least + 2 * table.nbytes
    assert plain.seconds > 2 * ours.seconds
    assert kernels.cells(ours)[3] == "2"


def test_attention_without_its_kernel(kernels: Any) -> None:
    q = kernels.meta(1, 2, 512, 64)
    call, without = kernels.attention, kernels.plain(kernels.attention)
    rows = [kernels.measure(kernels.Case("", "", f, (q, q, q)), TOPOLOGY) for f in (call, without)]
    assert [row.kernels for row in rows] == [1, 0]
    again = kernels.measure(kernels.Case("", "", call, (q, q, q)), TOPOLOGY)
    assert again.kernels == 1


def test_every_part_has_cases(kernels: Any) -> None:
    for part in kernels.PARTS.values():
        for case in part():
            assert all(x.device.type == "meta" for x in case.inputs)
            assert case.least is None or case.least >= max(x.nbytes for x in case.inputs)
