"""Errors of random operators: arguments, generators of other devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import DEVICE, error_of

pytestmark = pytest.mark.cuda


X = torch.zeros(3)
ERRORS: dict[str, Callable[[Any], Any]] = {
    "uniform": lambda d: X.to(d).uniform_(2, 1),
    "uniform too wide": lambda d: X.to(d).uniform_(-3e38, 3e38),
    "uniform bools": lambda d: torch.rand(3, dtype=torch.bool, device=d),
    "normal": lambda d: X.to(d).normal_(0, -1),
    "normal of a tensor": lambda d: torch.normal(X.to(d), -1.0),
    "normal of a size": lambda d: torch.normal(0.0, -1.0, (3,), device=d),
    "normal integers": lambda d: torch.randn(3, dtype=torch.int64, device=d),
    "log_normal": lambda d: X.to(d).log_normal_(0, 0),
    "exponential": lambda d: X.to(d).exponential_(0),
    "exponential integers": lambda d: X.long().to(d).exponential_(),
    "cauchy": lambda d: X.to(d).cauchy_(0, -1),
    "geometric": lambda d: X.to(d).geometric_(1),
    "bernoulli": lambda d: X.to(d).bernoulli_(1.5),
    "bernoulli of integers": lambda d: torch.bernoulli(X.long().to(d)),
    "random": lambda d: X.to(d).random_(5, 2),
    "random beyond the dtype": lambda d: X.to(torch.int8).to(d).random_(0, 1000),
    "randint": lambda d: torch.randint(5, 5, (3,), device=d),
    "randperm": lambda d: torch.randperm(-1, device=d),
    "randperm of a narrow dtype": lambda d: torch.randperm(300, dtype=torch.uint8, device=d),
    "randperm of one too many": lambda d: torch.randperm(257, dtype=torch.uint8, device=d),
    "randperm of halves": lambda d: torch.randperm(70000, dtype=torch.half, device=d),
    "randperm of bools": lambda d: torch.randperm(2, dtype=torch.bool, device=d),
    "randperm of complex": lambda d: torch.randperm(2, out=torch.ones(2).cfloat().to(d)),
    "gamma of integers": lambda d: torch._standard_gamma(X.long().to(d)),
    "dirichlet of integers": lambda d: torch._sample_dirichlet(X.long().to(d)),
    "rrelu of integers": lambda d: torch.rrelu(X.long().to(d), training=True),
    "multinomial": lambda d: torch.multinomial(torch.ones(3).to(d), 4),
    "multinomial of none": lambda d: torch.multinomial(torch.ones(3).to(d), 0),
    "multinomial of integers": lambda d: torch.multinomial(torch.ones(3).long().to(d), 1),
    "multinomial in 3 dimensions": lambda d: torch.multinomial(torch.ones(3, 3, 3).to(d), 1),
    "binomial of two dtypes": lambda d: torch.binomial(X.to(d), X.double().to(d)),
    "dropout": lambda d: torch.nn.functional.dropout(X.to(d), 1.5),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_pytorchs(name: str) -> None:
    expected = error_of(ERRORS[name], "cpu")
    assert expected[1]
    for _ in range(2):
        assert error_of(ERRORS[name], DEVICE) == expected


def test_errors_of_numbers_after_good_ones() -> None:
    """The kind of call is known by then."""
    x = torch.zeros(5, 2, device=DEVICE)
    for good, bad, text in (
        (lambda: x.exponential_(1.0), lambda: x.exponential_(-1.0), "expects lambda > 0.0, but"),
        (lambda: x.uniform_(0.0, 1.0), lambda: x.uniform_(1.0, 0.0), "expects to return a"),
        (lambda: x.normal_(0.0, 1.0), lambda: x.normal_(0.0, -1.0), "normal expects std >= 0.0"),
        (lambda: x.bernoulli_(0.5), lambda: x.bernoulli_(-0.5), "expects p to be in"),
        (lambda: x.geometric_(0.5), lambda: x.geometric_(0.0), "expects p to be in"),
    ):
        good()
        with pytest.raises(RuntimeError, match=text):
            bad()


def test_generators_of_other_devices() -> None:
    with pytest.raises(RuntimeError, match="Expected a 'lazyxla' device type for generator but"):
        torch.rand(3, device=DEVICE, generator=torch.Generator("cpu"))
