"""The table of what programs for the CPU leave to PyTorch's kernels, and how it is measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyxla
from lazyxla import kernel_measurements
from lazyxla.cache import kernel_table
from lazyxla.kernel_measurements import Work
from lazyxla.lowering.cpu import kernel_limits
from tests.support import assert_same, counted, on_device

RunPython = Callable[..., Any]

BF16, FLOAT32 = torch.bfloat16, torch.float32


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(lazyxla.settings, "cache_dir", str(tmp_path / "caches"))
    return tmp_path / "caches"


def test_what_pays() -> None:
    with kernel_limits.using({"matmul bfloat16": 100}):
        assert kernel_limits.pays("matmul", BF16, 100)
        assert not kernel_limits.pays("matmul", BF16, 99)
        assert not kernel_limits.pays("matmul", FLOAT32, 1 << 60)
        assert not kernel_limits.pays("convolution", BF16, 1 << 60)


@pytest.mark.parametrize(
    ("capabilities", "matmul", "keys"),
    [
        ({}, None, None),
        ({"avx512_bf16": False, "amx_bf16": False}, None, None),
        ({"avx512_bf16": True}, 1e7, 512),
        ({"avx512_bf16": True, "avx512_fp16": True}, None, 1024),
        ({"avx512_bf16": True, "avx512_fp16": True, "amx_bf16": True}, 1e7, 512),
    ],
)
def test_limits_of_processors(
    capabilities: dict[str, bool],
    matmul: float | None,
    keys: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels in bfloat16 only where a processor multiplies more of it than of float32."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(kernel_limits, "_current", None)
    monkeypatch.setattr(kernel_limits, "_kept", None)
    limits = kernel_limits.current()
    assert limits.get("matmul bfloat16") == matmul
    assert limits.get("convolution bfloat16") == matmul
    assert ("matmul of few rows float32" in limits) == (keys == 1024)
    assert limits.get("attention bfloat16") == keys


@pytest.mark.parametrize(
    ("shares", "least"),
    [
        ({1: 0.5, 2: 0.5, 3: 0.5}, 1),
        ({1: 1.5, 2: 0.9, 3: 0.5}, 2),
        ({3: 0.5, 1: 0.5, 2: 1.2}, 3),  # in any order; a gain below a loss does not count
        ({1: 0.5, 2: 0.8, 3: 0.99}, 1),  # nothing is lost where it is as fast
        ({1: 0.5, 2: 0.5, 3: 1.2}, math.inf),
        ({1: 0.94, 2: 0.99, 3: 1.01}, math.inf),  # no gain that noise could not be
        ({}, math.inf),
    ],
)
def test_limits(shares: dict[int, float], least: float) -> None:
    assert kernel_measurements.limit(shares) == least


def test_both_forms_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with as many calls as it should have."""
    monkeypatch.setattr(lazyxla.settings, "host_programs", False)
    calls: list[int] = []
    sync = kernel_measurements.runtime.sync

    def counted_sync(wait: bool) -> None:
        before = lazyxla.counters()["kernel_calls"]
        sync(wait=wait)
        calls.append(lazyxla.counters()["kernel_calls"] - before)

    monkeypatch.setattr(kernel_measurements.runtime, "sync", counted_sync)
    least = {work.kind: work for work in reversed(kernel_measurements.WORK)}
    for kind, work in least.items():
        calls.clear()
        xla, called = kernel_measurements.seconds(work, FLOAT32)
        assert xla > 0 < called, kind
        without, with_calls = sorted(set(calls))
        assert without == 0 < with_calls, kind
        assert calls.count(without) == calls.count(with_calls), kind


def test_all_sizes_of_the_default_table_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_limits, "_current", None)
    measured = {
        kernel_limits.entry(work.kind, dtype)
        for work in kernel_measurements.WORK
        for dtype in work.dtypes
    }
    assert set(kernel_limits.current()) <= measured


def test_a_table_is_made_of_what_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {("matmul", 10): (1.0, 2.0), ("matmul", 20): (2.0, 1.0), ("attention", 30): (1.0, 1.0)}
    monkeypatch.setattr(kernel_measurements, "seconds", lambda w, dtype: times[w.kind, w.size])
    work = [Work(kind, size, [], torch.mm, dtypes=[BF16]) for kind, size in times]
    lines: list[str] = []
    limits = kernel_measurements.measure(work, lines.append)
    assert limits == {"matmul bfloat16": 20, "attention bfloat16": math.inf}
    assert [line.split()[:2] for line in lines] == [
        ["matmul", "bfloat16"],
        ["matmul", "bfloat16"],
        ["attention", "bfloat16"],
    ]


def test_a_table_is_kept(directory: Path) -> None:
    assert kernel_table.kept() is None
    for limits in ({"matmul bfloat16": 1e7, "attention float32": math.inf}, {}):
        kernel_table.keep(limits)
        assert kernel_table.kept() == limits
    assert [path.name for path in directory.iterdir()] == [Path(kernel_table.path()).name]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"limits": 3}', '{"limits": {"matmul bfloat16": "fast"}}', "\0"]
)
def test_a_damaged_table_is_none(directory: Path, content: str) -> None:
    kernel_table.keep({})
    Path(kernel_table.path()).write_text(content)
    assert kernel_table.kept() is None


def test_a_table_is_of_its_machine(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_table.keep({})
    monkeypatch.setattr(kernel_table, "_machine", lambda: ("another processor", "64 threads"))
    assert kernel_table.kept() is None


SCRIPT = """
import torch, lazyxla
layer = torch.nn.Linear(80, 80, device="lazyxla")
lazyxla.sync(wait=True)
before = lazyxla.counters()
layer(torch.ones(80, 80, device="lazyxla")).sum().backward()
lazyxla.sync(wait=True)
after = lazyxla.counters()
print(*(after[name] - before[name] for name in ("kernel_calls", "compiles", "programs_loaded")))
"""


def test_processes_read_it(run_python: RunPython, directory: Path) -> None:
    """One that has a program of before the table was measured compiles it again."""

    def run() -> list[int]:
        printed = run_python(
            SCRIPT, LAZYXLA_CACHE_DIR=str(directory), LAZYXLA_CACHE_SIZE="64"
        ).stdout
        return [int(n) for n in printed.split()]

    assert run() == [0, 1, 0]
    assert run() == [0, 0, 1]
    kernel_table.keep({"matmul float32": 1})
    assert json.loads(Path(kernel_table.path()).read_text())["machine"]
    assert run() == [1, 1, 0]  # the gradient of the weight; the result itself is not asked for
    assert run() == [1, 0, 1]


def test_calls_within_a_region_of_other_limits() -> None:
    x, w = torch.randn(75, 76), torch.randn(77, 76)
    ours = on_device(x), on_device(w)
    with kernel_limits.using({"matmul float32": 1}), counted() as n:
        got = torch.nn.functional.linear(*ours)
        lazyxla.sync(wait=True)
    assert (n.kernel_calls, n.host_calls, n.fallbacks) == (1, 0, 0)
    assert_same(got, torch.nn.functional.linear(x, w))
