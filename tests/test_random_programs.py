"""Random programs over views, in-place writes, syncs and reads agree with the CPU, in each mode.

``pytest tests/test_random_programs.py --programs 10000`` runs more of them than the default.
"""

from __future__ import annotations

import pytest
import torch

import lazyxla
from tests.random_programs import RandomProgram
from tests.random_runs import portions, run_programs
from tests.support import DEVICE, counted

SHARES = {
    False: 1, True: 10, "fused": 10, ("host", False): 1, ("host", True): 1, ("host", "fused"): 10,
}  # fmt: skip
"""One in so many programs runs in this mode, too."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = portions(metafunc.config.getoption("--programs"), SHARES)
    metafunc.parametrize(("mode", "seed", "count"), cases)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded tensors is deprecated")
def test_random_programs(mode, seed, count):
    _drop_programs()
    with counted() as n:
        run_programs(RandomProgram, mode, seed, count)
    assert (n.host_programs > 0) == isinstance(mode, tuple)


def _drop_programs() -> None:
    """Empties the program cache: what another mode compiled is found, too, by the same programs."""
    before = lazyxla.settings.max_programs
    lazyxla.settings.max_programs = 1
    try:
        with counted() as n:
            for size in (3, 5):
                torch.ones(size, device=DEVICE).sinh().cosh().cpu()
    finally:
        lazyxla.settings.max_programs = before
    assert n.compiles > 0
