"""The cache of compiled programs is bounded; what leaves it is compiled again when it is met."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import lazyxla
from lazyxla import _C

LIMIT = 20


@pytest.fixture
def few_programs() -> Iterator[None]:
    """What other tests have compiled leaves first, a quarter at a time."""
    before = lazyxla.settings.max_programs
    lazyxla.settings.max_programs = LIMIT
    try:
        for size in range(1000, 1100):
            if _C.cached_programs() > LIMIT:
                compute(size).item()
        yield
    finally:
        lazyxla.settings.max_programs = before


def compute(size: int) -> torch.Tensor:
    """A program of its own for each size."""
    x = torch.full((size,), 3.0, device="lazyxla")
    return ((x * x).cumsum(0) - size).sum()


def expected(size: int) -> float:
    return 9.0 * size * (size + 1) / 2 - size * size


@pytest.mark.parametrize("mode", [False, True])
def test_the_cache_is_bounded(few_programs: None, mode: bool) -> None:
    lazyxla.reset_counters()
    with lazyxla.eager_mode(mode):
        for size in range(200, 200 + 3 * LIMIT):
            assert compute(size).item() == expected(size)
            assert _C.cached_programs() <= LIMIT
    assert lazyxla.counters()["programs_dropped"] > 0


def test_large_programs_count_as_several(few_programs: None) -> None:
    """One of 300 operators as four, so that there is room for five of them."""
    for size in range(700, 710):
        x = torch.ones(size, device="lazyxla")
        for _ in range(100):
            x = (x + x).neg().abs() * 0.5
        assert x.sum().item() == size
    assert 2 <= _C.cached_programs() <= 1 + LIMIT // 4


def test_what_runs_often_stays(few_programs: None) -> None:
    compute(300).item()
    for size in range(301, 301 + 3 * LIMIT):
        compute(size).item()
        lazyxla.reset_counters()
        assert compute(300).item() == expected(300)
        assert lazyxla.counters()["compiles"] == 0


def test_what_runs_in_stages_often_stays(few_programs: None) -> None:
    weight = torch.linspace(-1, 1, 16).reshape(4, 4).to("lazyxla")

    def in_stages(length: int) -> float:
        x = torch.ones(length, 4).to("lazyxla")
        y = (x @ weight).relu().exp().square().sum(0)
        for _ in range(10):
            y = (y.sin() @ weight).relu()
        return (x + y).exp().cos().square().sum().item()

    lazyxla.reset_counters()
    found = [in_stages(length) for length in range(120, 124)]
    assert lazyxla.counters()["graphs_cut"] > 0
    for size in range(601, 601 + 2 * LIMIT):  # fewer than make it compiled as a whole
        compute(size).item()
        lazyxla.reset_counters()
        assert in_stages(123) == found[-1]
        assert lazyxla.counters()["compiles"] == lazyxla.counters()["graphs_cut"] == 0


def test_a_dropped_program_is_compiled_again_and_says_why(
    few_programs: None, caplog: pytest.LogCaptureFixture
) -> None:
    for size in range(400, 400 + 3 * LIMIT):
        compute(size).item()
    lazyxla.reset_counters()
    before = lazyxla.settings.log_level
    lazyxla.settings.log_level = "info"
    try:
        assert compute(400).item() == expected(400)
    finally:
        lazyxla.settings.log_level = before
    assert lazyxla.counters()["compiles"] == 1
    assert "whose program was dropped, since there were more than LAZYXLA_MAX_PROGRAMS" in (
        caplog.text
    )


def test_results_of_dropped_programs_stay(few_programs: None) -> None:
    """Also those that are still being computed: nothing waits here before the end."""
    results = []
    for size in range(500, 500 + 3 * LIMIT):
        results.append(compute(size))
        lazyxla.sync()
    assert [r.item() for r in results] == [expected(s) for s in range(500, 500 + 3 * LIMIT)]


def test_code_gives_its_mappings_back(run_python) -> None:
    """XLA's process dies when it gets no more of them."""
    run_python("""
import torch, lazyxla
def mappings():
    with open("/proc/self/maps") as file:
        return sum(1 for _ in file)
def run(sizes):
    for size in sizes:
        (torch.ones(size, device="lazyxla") * 2 + 1).sum().item()
lazyxla.settings.max_programs = 20
run(range(1, 41))
before = mappings()
run(range(41, 191))
# A program takes four and more; some of XLA's threads take memory of their own late.
assert mappings() < before + 300, (before, mappings())
""")
