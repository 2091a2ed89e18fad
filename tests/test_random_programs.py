"""Random programs over views, in-place writes, syncs and reads agree with the CPU, in each mode.

``pytest tests/test_random_programs.py --programs 10000`` runs more of them than the default.
"""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

import lazyxla
from tests.random_programs import RandomProgram

PER_TEST = 100
SHARES = {False: 1, True: 10, "fused": 10}  # one in so many programs runs in this mode, too


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = []
    for mode, share in SHARES.items():
        count = metafunc.config.getoption("--programs") // share
        chunks = [min(PER_TEST, count - start) for start in range(0, count, PER_TEST)]
        cases += [(mode, seed, count) for seed, count in enumerate(chunks)]
    metafunc.parametrize(("mode", "seed", "count"), cases)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded tensors is deprecated")
def test_random_programs(mode, seed, count):
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
    def run(random, steps):
        program = RandomProgram(random.choice)
        try:
            with lazyxla.eager_mode(mode):
                program.run(steps)
        except BaseException:
            hypothesis.note("\n".join(program.lines))
            raise
        finally:
            program.forget()

    run()
