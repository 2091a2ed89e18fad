"""Functions of complex values: small parts, branch cuts, infinities and nan; hyperbolic ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

import lazyxla

INF, NAN = math.inf, math.nan
FUNCTIONS = ("sin", "cos", "sinh", "cosh")
CUTS = ("sqrt", "acos", "acosh", "asin", "asinh", "atan", "atanh")


def _all(parts: list[float], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([complex(*pair) for pair in itertools.product(parts, parts)], dtype=dtype)


def _results(x: torch.Tensor, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Of one program."""
    on_device = x.to("lazyxla")
    found = {name: getattr(torch, name)(on_device) for name in names}
    lazyxla.sync()
    return {name: result.cpu() for name, result in found.items()}


def _compare_parts(found: torch.Tensor, expected: torch.Tensor, **options: float) -> None:
    """Of the whole, a tolerance would hide that a small part is lost; a nan, what is beside it."""
    parts = torch.view_as_real(found), torch.view_as_real(expected)
    torch.testing.assert_close(*parts, equal_nan=True, **options)


def test_small_parts_are_kept() -> None:
    sizes = [1e-12, 1e-8, 1e-5, 0.01, 0.3, 1, 3, 20, 80]
    x = _all([*sizes, *(-s for s in sizes)], torch.complex64)
    for name, found in _results(x, FUNCTIONS).items():
        # Closer than the default, which would not see that a part is lost; but XLA's CPU compiler
        # takes float32 numbers below 1e-37 for zero.
        _compare_parts(found, getattr(torch, name)(x), rtol=1e-6, atol=1e-37)


def test_zeros_have_the_side_of_a_branch_cut() -> None:
    x = _all([0.0, -0.0, 0.5, -0.5, 3, -3], torch.complex64)
    for name, found in _results(x, CUTS).items():
        torch.testing.assert_close(found, getattr(torch, name)(x))


def test_infinite_and_nan_parts_of_an_absolute_value() -> None:
    x = _all([0.0, 1, -2, INF, -INF, NAN], torch.complex64)
    on_device = x.to("lazyxla")
    torch.testing.assert_close(on_device.abs().cpu(), x.abs(), equal_nan=True)
    y = torch.tensor([complex(1, NAN), complex(2, 1)])
    norms: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: torch.linalg.vector_norm(t, INF),
        lambda t: torch.linalg.vector_norm(t, 1),
        torch.linalg.vector_norm,
        torch.sgn,
    ]
    for function in norms:
        torch.testing.assert_close(function(y.to("lazyxla")).cpu(), function(y), equal_nan=True)
    assert not torch.allclose(y.to("lazyxla"), y.nan_to_num().to("lazyxla"))


def test_infinite_parts() -> None:
    """A zero of a sine is exact, 0 even times infinity."""
    x = torch.tensor([complex(0, 1e10), complex(-0.0, -1e10), complex(0, INF), complex(1, 1e10)])
    for name, result in _results(x, ("sin", "cos")).items():
        _compare_parts(result, getattr(torch, name)(x))
    x = _all([0.0, 1, -2, INF, -INF, NAN], torch.complex64)
    _compare_parts(_results(x, ("exp",))["exp"], torch.exp(x))
    power = torch.exp2(torch.tensor([complex(INF, 0), complex(INF, 1)]).to("lazyxla")).cpu()
    assert power.real.tolist() == [INF, INF]


def test_large_hyperbolic_functions() -> None:
    """They overflow where their results do, and are as exact as others."""
    for dtype, most in ((torch.float32, 89.4), (torch.float64, 709.0)):
        x = torch.linspace(-most, most, 4001, dtype=torch.float64).to(dtype)
        special = torch.tensor([0.0, -0.0, 1e-30, INF, -INF, NAN, 2 * most], dtype=dtype)
        x = torch.cat([x, special])
        for name, found in _results(x, ("sinh", "cosh")).items():
            # PyTorch's own vectorized kernels overflow earlier. Closer than the default, which
            # would not see the error of XLA's form.
            expected = getattr(torch, name)(x.double()).to(dtype)
            torch.testing.assert_close(
                found, expected, rtol=4 * torch.finfo(dtype).eps, atol=0, equal_nan=True
            )


def test_complex_powers_of_zero() -> None:
    x, y = torch.tensor([0j, complex(-0.0, 0), 1j]), torch.tensor([1 + 1j, 0.5 - 3j, 2, 1 + 1j])
    found = torch.pow(x[:, None].to("lazyxla"), y.to("lazyxla")).cpu()
    torch.testing.assert_close(found, torch.pow(x[:, None], y))
    torch.testing.assert_close((x.to("lazyxla") ** (1 + 1j)).cpu(), x ** (1 + 1j))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_powers_whose_parts_overflow(dtype: torch.dtype) -> None:
    """The power of the size, or that of the angle, is 0 or infinity; their product need not be."""
    torch.manual_seed(0)
    size = 50 if dtype == torch.complex64 else 300
    x, y = (torch.randn(2, 2000, dtype=torch.complex128) * size).to(dtype)
    exponent = y.real * x.abs().log() - y.imag * x.angle()
    bound = math.log(torch.finfo(dtype).max) - 5
    parts = (y.real * x.abs().log()).abs() > bound
    assert (parts & (exponent.abs() < bound)).sum() > 50
    expected, found = torch.pow(x, y), torch.pow(x.to("lazyxla"), y.to("lazyxla")).cpu()
    torch.testing.assert_close(found.isnan(), expected.isnan())
    # Within these bounds each rounding of an exponent of so much counts as often.
    kept = exponent.abs() < bound
    rtol = 64 * bound * torch.finfo(dtype).eps
    torch.testing.assert_close(found[kept], expected[kept], rtol=rtol, atol=0)
    for number in (2, 0.5, -1 + 0.5j):
        result = torch.pow(number, y.to("lazyxla")).cpu()
        torch.testing.assert_close(result.isnan(), torch.pow(number, y).isnan())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_infinite_terms_of_complex_sums(dtype: torch.dtype) -> None:
    """PyTorch multiplies the second term with alpha, also if that is 1: inf + nanj."""
    x = _all([0.0, 1, INF, -INF, NAN], dtype)
    y = x.flip(0).contiguous()
    sums: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        lambda x, y: x + y,
        lambda x, y: x - y,
        lambda x, _: x + complex(INF, 0),
        lambda x, _: complex(0, INF) - x,
        lambda x, _: x.real + complex(INF, 0),
        lambda x, _: torch._foreach_add([x], complex(INF, 0))[0],
    ]
    lazyxla.reset_counters()
    found = [f(x.to("lazyxla"), y.to("lazyxla")) for f in sums]
    lazyxla.sync()
    assert lazyxla.counters()["executions"] == 1
    assert not lazyxla.fallbacks()
    for f, result in zip(sums, found, strict=True):
        _compare_parts(result.cpu(), f(x, y))


def test_complex_powers_that_are_not_finite() -> None:
    """0 and infinity to powers whose logarithms are infinite or nan; 0 and 1 as numbers."""
    x = torch.tensor([0j, 1, 1j, -1, 2 - 1j, complex(INF, 0), 0.5])
    numbers = (0, 1, -1, 0.5, -0.5, 2 - 1j, 1j)
    on_device = x.to("lazyxla")
    powers = {y: (on_device**y, torch.pow(y, on_device)) for y in numbers}
    table = torch.pow(on_device[:, None], on_device)
    bounds = {"rtol": 1e-5, "atol": 1e-6}
    _compare_parts(table.cpu(), torch.pow(x[:, None], x), **bounds)
    for y, (power, of_number) in powers.items():
        _compare_parts(power.cpu(), x**y, **bounds)
        _compare_parts(of_number.cpu(), torch.pow(y, x), **bounds)
