"""Random programs and trainings whose tensors are spread agree with the CPU, in each mode."""

from __future__ import annotations

import random

import hypothesis
import pytest
from hypothesis import strategies as st
from random_sharded import ShardedProgram
from random_training import RandomTraining

import lazyxla

PER_TEST = 100
SHARES = {False: 4, True: 40, "fused": 40}  # one in so many of --programs runs in this mode
TRAININGS = 200  # there is one for so many programs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    programs = metafunc.config.getoption("--programs")
    if "number" in metafunc.fixturenames:
        metafunc.parametrize("number", range(programs // TRAININGS))
        return
    cases = []
    for mode, share in SHARES.items():
        count = programs // share
        chunks = [min(PER_TEST, count - start) for start in range(0, count, PER_TEST)]
        cases += [(mode, first, count) for first, count in enumerate(chunks)]
    metafunc.parametrize(("mode", "first", "count"), cases)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded tensors is deprecated")
def test_random_programs(mode, first, count):
    @hypothesis.seed(first)
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
        program = ShardedProgram(random.choice)
        try:
            with lazyxla.eager_mode(mode):
                program.run(steps)
        except BaseException:
            hypothesis.note("\n".join(program.lines))
            raise
        finally:
            program.forget()

    run()


@pytest.mark.usefixtures("fresh_dynamo")
def test_random_trainings(number):
    training = RandomTraining(random.Random(number))
    try:
        training.run(5)
    except BaseException as error:
        error.add_note("\n".join(training.lines))
        raise
