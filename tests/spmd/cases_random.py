"""Random programs and trainings whose tensors are spread agree with the CPU, in each mode."""

from __future__ import annotations

import random

import pytest
from random_sharded import ShardedProgram
from random_training import RandomTraining

from tests.random_runs import portions, run_programs

SHARES = {False: 4, True: 40, "fused": 40}  # one in so many of --programs runs in this mode
TRAININGS = 200  # there is one for so many programs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    programs = metafunc.config.getoption("--programs")
    if "number" in metafunc.fixturenames:
        metafunc.parametrize("number", range(programs // TRAININGS))
    else:
        metafunc.parametrize(("mode", "seed", "count"), portions(programs, SHARES))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded tensors is deprecated")
def test_random_programs(mode, seed, count):
    run_programs(ShardedProgram, mode, seed, count)


@pytest.mark.usefixtures("fresh_dynamo")
def test_random_trainings(number):
    training = RandomTraining(random.Random(number))
    try:
        training.run(5)
    except BaseException as error:
        error.add_note("\n".join(training.lines))
        raise
