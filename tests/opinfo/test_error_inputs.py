"""All calls that PyTorch's tables know to be errors are refused at the call: error_inputs.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

import lazyxla
from tests.opinfo.entries import entries
from tests.opinfo.error_inputs import (
    DATA_DEPENDENT,
    WrongCall,
    difference,
    error_on,
    of_modules,
    of_operator,
)


def _differences(calls: Iterable[WrongCall]) -> tuple[int, dict[str, str]]:
    """How many of the calls the CPU refuses, and those that the device does not refuse likewise."""
    refused, differences = 0, {}
    for wrong in calls:
        theirs = error_on("cpu", wrong)
        if theirs is None:
            continue
        refused += 1
        found = difference(wrong, theirs)
        if found is not None:
            differences[wrong.name] = f"{found.kind}: {found.message}"
    return refused, differences


def _of_operators(names: Iterable[str]) -> Iterator[WrongCall]:
    for name in names:
        yield from of_operator(name, entries()[name])


@pytest.mark.filterwarnings("ignore")
def test_all_refuse_what_the_cpu_refuses() -> None:
    before = lazyxla.counters()["executions"]
    refused, differences = _differences([*_of_operators(entries()), *of_modules()])
    assert refused > 700
    assert {n: d for n, d in differences.items() if n not in DATA_DEPENDENT} == {}
    assert set(differences) == set(DATA_DEPENDENT)
    # At the call: nothing had to run to find them, but what reads its arguments by its nature.
    assert lazyxla.counters()["executions"] - before < 50


@pytest.mark.filterwarnings("ignore")
def test_what_depends_on_data_is_refused_when_asked_for() -> None:
    names = {name.split()[0] for name in DATA_DEPENDENT}
    lazyxla.settings.check_indices = True
    try:
        refused, differences = _differences(
            [*_of_operators(names & entries().keys()), *of_modules()]
        )
    finally:
        lazyxla.settings.check_indices = False
    assert refused > len(DATA_DEPENDENT)
    assert differences == {}
