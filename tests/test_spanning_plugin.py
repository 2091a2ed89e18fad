"""The plugin of tests/spanning, by itself: JAX runs over several processes with it."""

from __future__ import annotations

import pytest

from tests.spanning import cases_jax, processes


@pytest.fixture(scope="module")
def results() -> list[dict[str, str]]:
    return processes.run("tests.spanning.cases_jax", processes=2, devices=2)


@pytest.mark.parametrize("case", cases_jax.CASES)
def test_programs_of_jax(case: str, results: list[dict[str, str]]) -> None:
    for rank, of_rank in enumerate(results):
        assert not of_rank[case], f"process {rank}: {of_rank[case]}"
