"""Bessel functions, orthogonal polynomials and Hurwitz's zeta against PyTorch's CPU kernels."""

import math

import pytest
import torch
from scipy import special

from tests.lowering.harness import check, run

BESSEL = {
    "special_airy_ai": lambda x: special.airy(x)[0],
    "special_bessel_j0": special.j0,
    "special_bessel_j1": special.j1,
    "special_bessel_y0": special.y0,
    "special_bessel_y1": special.y1,
    "special_modified_bessel_k0": special.k0,
    "special_modified_bessel_k1": special.k1,
    "special_scaled_modified_bessel_k0": special.k0e,
    "special_scaled_modified_bessel_k1": special.k1e,
    "special_spherical_bessel_j0": lambda x: special.spherical_jn(0, abs(x)),
}
POLYNOMIALS = [
    "chebyshev_polynomial_t",
    "chebyshev_polynomial_u",
    "chebyshev_polynomial_v",
    "chebyshev_polynomial_w",
    "shifted_chebyshev_polynomial_t",
    "shifted_chebyshev_polynomial_u",
    "shifted_chebyshev_polynomial_v",
    "shifted_chebyshev_polynomial_w",
    "hermite_polynomial_h",
    "hermite_polynomial_he",
    "laguerre_polynomial_l",
    "legendre_polynomial_p",
]


@pytest.mark.parametrize("name", BESSEL)
def test_bessel(name: str) -> None:
    """On both sides of where the asymptotic series take over, against SciPy.

    PyTorch's own kernels err by up to 6e-7 (Y1) and 2e-6 (Ai) here, in float64.
    """
    x = torch.linspace(0.1, 40, 400, dtype=torch.float64)
    if "_k" not in name and "_y" not in name:
        x = torch.cat([-x, x])
    (ours,) = run(f"aten::{name}", x)
    torch.testing.assert_close(ours, torch.from_numpy(BESSEL[name](x.numpy())))


@pytest.mark.parametrize("name", BESSEL)
def test_bessel_limits(name: str) -> None:
    edges = [0.0, math.nan] + [-1.0] * ("_k" in name or "_y" in name)
    check(f"aten::{name}", torch.tensor(edges))
    check(f"aten::{name}", torch.tensor([0.25, 1.0, 3.5, 20.0]))


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_polynomials(name: str) -> None:
    x = torch.linspace(-2, 2, 41, dtype=torch.float64)
    n = torch.arange(-1, 14, dtype=torch.float64)
    check(f"aten::special_{name}", x[:, None].expand(41, 15), n.expand(41, 15))


def test_enormous_degree_ends() -> None:
    x = torch.tensor([3.0, -5.0], dtype=torch.float64)
    check("aten::special_legendre_polynomial_p", x, torch.full((2,), 1e9, dtype=torch.float64))


def test_zeta_left_of_zero() -> None:
    q = torch.tensor([-8.478, -8.0677, -3.0, -0.5, 0.0, 0.5, 12.0])
    for exponent in (2.0, 3.0, 5.0):
        check("aten::special_zeta", torch.full_like(q, exponent), q)


def test_polygamma_left_of_zero() -> None:
    for order in (2, 3, 4):
        check("aten::polygamma", order, torch.tensor([-8.478, -8.0677, -0.5, 0.5]))
