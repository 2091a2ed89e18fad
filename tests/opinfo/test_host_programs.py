"""PyTorch's table of operators as host programs: its own kernels, on memory of the device.

Operands and results are views of memory that the program makes, and written to (views.py).
"""

from __future__ import annotations

import pytest
import torch

import lazyxla
from tests.opinfo.checks import check_entry
from tests.opinfo.entries import entries, supports
from tests.opinfo.expected import unexpected
from tests.opinfo.outcome import VIEWS
from tests.opinfo.test_opinfo import FLOAT32
from tests.random_runs import in_mode

# Those that no host program needs to run, by the reason why.
COMPILED = {
    "random": [
        *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial"),
        *("nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d"),
        *("nn.functional.rrelu", "normal", "normal.in_place", "normal.number_mean", "pca_lowrank"),
        *("rand_like", "randint", "randint_like", "randn", "randn_like", "svd_lowrank", "uniform"),
    ],
    "a floating-point number becomes an integer": [
        *("byte", "char", "int", "long", "nanquantile", "quantile", "short"),
    ],
    "the remainder of integers": ["take_along_dim"],
    "offsets, which PyTorch's kernels do not check": [
        *("_segment_reduce.lengths", "_segment_reduce.offsets", "nn.functional.embedding_bag"),
    ],
    "PyTorch's kernels refuse zeros": [
        *("cholesky", "linalg.ldl_solve", "linalg.lu_solve", "lu_solve", "lu_unpack"),
    ],
    "an operator of lazyxla's own": ["nn.functional.cross_entropy"],
    "nothing is computed": ["broadcast_shapes"],
}
_COMPILED = {name for names in COMPILED.values() for name in names}
OTHERS = ("int64", "bool", "bfloat16", "complex64")


@pytest.mark.parametrize("name", FLOAT32)
def test_first_sample(name: str) -> None:
    with in_mode(("host", False)):
        outcome = check_entry(name, torch.float32, VIEWS, 1)
    assert unexpected(outcome, complete=False) == []
    if outcome.samples and outcome.passed and name not in _COMPILED:
        assert lazyxla.counters()["host_programs"] > 0


@pytest.mark.parametrize("name", OTHERS)
def test_other_dtypes(name: str) -> None:
    dtype, problems, checked, on_host = getattr(torch, name), [], 0, 0
    with in_mode(("host", False)):
        for entry in (n for n, op in entries().items() if supports(op, dtype, VIEWS)):
            outcome = check_entry(entry, dtype, VIEWS, 2)
            problems += unexpected(outcome, complete=False)
            checked += outcome.samples > 0
            on_host += lazyxla.counters()["host_programs"] > 0
    assert problems == []
    assert on_host > 0.85 * checked
    assert checked > 200
