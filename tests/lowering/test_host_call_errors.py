"""Errors in host calls: PyTorch's own, those of a kernel, and in traced graphs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazyxla
from lazyxla.dynamo import backend
from tests.lowering.host_calls import in_one_program, square
from tests.support import DEVICE, assert_same, check, counted, error_of, on_device


@pytest.mark.parametrize("function", [torch.linalg.inv, lambda a: torch.linalg.solve(a, a)])
def test_errors_that_pytorch_reads_from_info_are_its_own(function: Callable[..., Any]) -> None:
    singular = torch.ones(3, 3)
    assert error_of(function, singular.to(DEVICE)) == error_of(function, singular)
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        function(singular.to(DEVICE))


FACTORIZATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "cholesky": lambda a: torch.linalg.cholesky_ex(a, check_errors=True),
    "inv": lambda a: torch.linalg.inv_ex(a, check_errors=True),
    "lu": lambda a: torch.linalg.lu_factor_ex(a, check_errors=True),
    "ldl": lambda a: torch.linalg.ldl_factor_ex(a, check_errors=True),
    "solve": lambda a: torch.linalg.solve_ex(a, a, check_errors=True),
    "out": lambda a: torch.linalg.inv_ex(
        a,
        check_errors=True,
        out=(torch.empty_like(a), torch.empty(a.shape[:-2], dtype=torch.int32, device=a.device)),
    ),
}


@pytest.mark.parametrize("name", FACTORIZATIONS)
def test_factorizations_that_check_raise_at_the_call(name: str) -> None:
    """One matrix, and one of several; others raise nothing."""
    factorize = FACTORIZATIONS[name]
    several = torch.stack([square(), torch.zeros_like(square())])
    for a in (several[1], several):
        assert error_of(factorize, a.to(DEVICE)) == error_of(factorize, a)
        with pytest.raises(RuntimeError):  # LinAlgError or, of LU, RuntimeError itself
            factorize(a.to(DEVICE))
    symmetric = square() @ square().mT
    if name != "out":
        check(factorize, symmetric, strides=False)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_value_ends_the_process(value: float) -> None:
    """PyTorch's own kernel for eigenvalues crashes with nan."""
    a = square()
    a[1, 0] = value
    for function in (torch.linalg.eigvals, torch.linalg.eig):
        with pytest.raises(RuntimeError, match="should not contain infs or NaNs"):
            function(a.to(DEVICE))[0].cpu()


def test_a_kernels_error_is_told_to_the_reader() -> None:
    a = torch.full((3, 3), float("nan")).to(DEVICE)
    before = a + 1
    values = torch.linalg.svdvals(a)
    with pytest.raises(RuntimeError) as error:
        values.cpu()
    pattern = r"lazyxla: .*aten::_linalg_svd.*linalg.svd: The algorithm failed to converge because"
    assert re.search(pattern, str(error.value), re.DOTALL), str(error.value)
    with pytest.raises(RuntimeError, match="aten::_linalg_svd"):  # its whole program has failed
        before.cpu()
    check(torch.linalg.svdvals, square())


KERNELS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cholesky_inverse": torch.cholesky_inverse,
    "svdvals": lambda a: torch.linalg.svdvals(a / 0),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("at_once", [True, False], ids=["started at once", "behind"])
def test_a_matrix_outside_the_domain_is_a_linear_algebra_error(name: str, at_once: bool) -> None:
    """Of the class that PyTorch's kernel raises, at each read."""
    with pytest.raises(torch.linalg.LinAlgError):
        KERNELS[name](torch.zeros(3, 3))
    first = torch.zeros(3 if at_once else 500, 3 if at_once else 500, device=DEVICE)
    a = (first @ first if not at_once else first)[:3, :3].clone()
    lazyxla.sync()
    result = KERNELS[name](a)
    for _ in range(2):
        with pytest.raises(
            torch.linalg.LinAlgError, match=r"lazyxla: .*linalg|lazyxla: .*cholesky"
        ):
            result.cpu()
    check(torch.linalg.svdvals, square())


def test_an_error_on_the_plugins_threads() -> None:
    """A program with much else to do goes on behind the call that starts it."""
    large = torch.randn(500, 500).to(DEVICE)
    values = torch.linalg.svdvals((large * large + large)[:3, :3] * float("nan"))
    lazyxla.sync()
    with pytest.raises(RuntimeError, match=r"aten::_linalg_svd: linalg\.svd: The algorithm failed"):
        values.cpu()
    lazyxla.sync(wait=True)  # it is told once
    check(torch.linalg.svdvals, square())


@pytest.mark.usefixtures("fresh_dynamo")
def test_errors_in_a_traced_graph() -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(a * 2) + 1

    compiled = torch.compile(function, backend=backend)
    a = square()
    assert_same(compiled(a.to(DEVICE)), function(a), strides=False)
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        compiled(torch.ones(4, 4, dtype=a.dtype).to(DEVICE))


def test_the_ex_forms_need_no_read() -> None:
    def function(a: torch.Tensor) -> Any:
        return torch.linalg.inv_ex(a, check_errors=False)

    _, info = in_one_program(function, square())
    assert info.item() == 0
    with counted() as n:
        torch.linalg.inv(on_device(square()))
    assert n.downloads == 1
