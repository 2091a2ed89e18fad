"""Runs programs of random_programs.py by hypothesis, which finds the shortest that fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st

import lazyxla
from tests.random_programs import Pick, RandomProgram


def portions(programs: int, shares: dict[Any, int], each: int = 100) -> list[tuple[Any, int, int]]:
    """The modes, seeds and numbers of programs of tests that run one in so many in each mode."""
    found = []
    for mode, share in shares.items():
        count = programs // share
        chunks = [min(each, count - start) for start in range(0, count, each)]
        found += [(mode, seed, size) for seed, size in enumerate(chunks)]
    return found


@contextlib.contextmanager
def in_mode(mode: Any) -> Iterator[None]:
    """One of the modes, or ("host", mode): one in which PyTorch's kernels run what is new."""
    if not isinstance(mode, tuple):
        with lazyxla.eager_mode(mode):
            yield
        return
    before = lazyxla.settings.host_programs
    lazyxla.settings.host_programs = True
    try:
        with torch.no_grad(), lazyxla.eager_mode(mode[1]):
            yield
    finally:
        lazyxla.settings.host_programs = before


def run_programs(kind: type[RandomProgram], mode: Any, seed: int, count: int) -> None:
    """Runs random programs in a mode; one that fails is shown, as short as it can be."""

    def run(pick: Pick, steps: int) -> None:
        program = kind(pick)
        try:
            with in_mode(mode):
                program.run(steps)
        except BaseException:
            hypothesis.note("\n".join(program.lines))
            raise
        finally:
            program.forget()

    run_random(run, seed, count)


def run_random(run: Callable[[Pick, int], None], seed: int, count: int) -> None:
    """Calls `run` so many times, with choices of its own and a number of steps each time."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        print_blob=False,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.randoms(), st.integers(1, 14))
    def run_once(random: Any, steps: int) -> None:
        run(random.choice, steps)

    run_once()
