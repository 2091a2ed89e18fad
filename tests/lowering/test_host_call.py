"""Host calls: PyTorch's CPU kernels within a program, for operators without an XLA form."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazyxla
from lazyxla.dynamo import backend
from tests.lowering.host_calls import hermitian, in_one_program, matrix, square
from tests.support import DEVICE, assert_same, check, counted, on_device

REAL = [torch.float32, torch.float64]
FLOATING = [*REAL, torch.complex64, torch.complex128]


# --- Values --------------------------------------------------------------------------------------

UNIQUE: dict[str, Callable[[torch.Tensor], Any]] = {
    "svdvals": torch.linalg.svdvals,
    "eigvalsh": lambda a: torch.linalg.eigvalsh(a + a.mH),
    "inv_ex": torch.linalg.inv_ex,
    "solve_ex": lambda a: torch.linalg.solve_ex(a, a.mT @ a),
    "det": torch.linalg.det,
    "slogdet": torch.linalg.slogdet,
    "lu_factor_ex": torch.linalg.lu_factor_ex,
    "lu": torch.linalg.lu,
    "lu_solve": lambda a: torch.linalg.lu_solve(*torch.linalg.lu_factor_ex(a)[:2], a.mT),
    "ldl": lambda a: torch.linalg.ldl_solve(*torch.linalg.ldl_factor_ex(a + a.mH)[:2], a),
    "matrix_exp": lambda a: torch.linalg.matrix_exp(a / 4),
    "qr": torch.linalg.qr,
    "geqrf": torch.geqrf,
    "householder_product": lambda a: torch.linalg.householder_product(*torch.geqrf(a)),
    "ormqr": lambda a: torch.ormqr(*torch.geqrf(a), a),
    "cholesky_inverse": lambda a: torch.cholesky_inverse(a.tril()),
    "pinv": lambda a: torch.linalg.pinv(a, hermitian=False),
    "matrix_norm": lambda a: torch.linalg.matrix_norm(a, ord="nuc"),
}


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("name", UNIQUE)
def test_results_that_are_unique(name: str, dtype: torch.dtype) -> None:
    in_one_program(UNIQUE[name], square(dtype, 3))


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (2, 3, 5), (0, 3), (2, 0, 3, 3)], ids=str)
@pytest.mark.parametrize("full", [False, True])
def test_svd(shape: tuple[int, ...], full: bool, dtype: torch.dtype) -> None:
    a = matrix(*shape, dtype=dtype)
    u, s, vh = torch.linalg.svd(a.to(DEVICE), full_matrices=full)
    expected = torch.linalg.svd(a, full_matrices=full)
    for ours, theirs in zip((u, s, vh), expected, strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (
            theirs.shape,
            theirs.dtype,
            theirs.stride(),
        )
    assert_same(s, expected.S)
    k = min(shape[-2:])
    torch.testing.assert_close(((u[..., :k] * s.unsqueeze(-2)) @ vh[..., :k, :]).cpu(), a)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_eigh(dtype: torch.dtype) -> None:
    a = hermitian(dtype, 2)
    values, vectors = torch.linalg.eigh(a.to(DEVICE))
    assert_same(values, torch.linalg.eigvalsh(a))
    rebuilt = (vectors * values.unsqueeze(-2)) @ vectors.mH
    torch.testing.assert_close(rebuilt.cpu(), a)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_eig(dtype: torch.dtype) -> None:
    a = square(dtype, 2)
    values, vectors = torch.linalg.eig(a.to(DEVICE))
    assert values.is_complex()
    rebuilt = vectors @ torch.diag_embed(values) @ torch.linalg.inv_ex(vectors)[0]
    torch.testing.assert_close(rebuilt.cpu(), a.to(values.dtype))


def test_what_surrounds_a_call_is_in_its_program() -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        b = (a * 2).tanh().mT
        return torch.linalg.svdvals(b).log().sum() + torch.linalg.det(b[:2, :2])

    with counted() as n:
        in_one_program(function, square())
    assert n.host_calls == 4  # twice two: in_one_program runs it twice


def test_views_and_writes() -> None:
    def function(a: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        torch.linalg.inv_ex(
            a[::2, ::2], out=(out[0], torch.empty(0, dtype=torch.int32).to(a.device))
        )
        out[1].copy_(torch.linalg.qr(a.mT[1:3, 1:3]).Q)
        return out.sum(0)

    check(function, matrix(4, 4), torch.zeros(2, 2, 2, dtype=torch.float64))


OTHERS: dict[str, Callable[..., Any]] = {
    "float list": lambda x: torch.histogram(x, 4, range=(-1.0, 1.0), density=True),
    "tensors": lambda x: torch.histogram(x, torch.tensor([-1.0, 0.0, 0.5, 2.0]).to(x.device)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_arguments_of_all_kinds(name: str) -> None:
    in_one_program(OTHERS[name], torch.linspace(-1.5, 2, 6))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_dtypes_of_operands_and_results(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 0, 1, 3]).to(dtype)
    in_one_program(lambda t: torch._convert_indices_from_coo_to_csr(t, 4), x)


# --- Modes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, "fused"])
def test_eager_modes(mode: Any) -> None:
    lazyxla.reset_counters()
    a = square()
    with lazyxla.eager_mode(mode):
        for _ in range(3):
            check(lambda a: torch.linalg.slogdet(a @ a), a)
        assert lazyxla.fallbacks() == {}


def test_within_a_full_graph() -> None:
    @lazyxla.compile(full_graph=True)
    def function(a: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(a + 1).sum() * 2

    a = square()
    with counted() as n:
        result = function(a.to(DEVICE))
        lazyxla.sync(wait=True)
    assert (n.executions, n.host_calls, n.fallbacks) == (1, 1, 0)
    assert_same(result, torch.linalg.svdvals(a + 1).sum() * 2)


@pytest.mark.usefixtures("fresh_dynamo")
def test_within_a_traced_graph() -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(a.tanh()).square().sum() + a.mean()

    theirs = matrix(4, 3).requires_grad_()
    ours = on_device(theirs)
    expected = function(theirs)
    expected.backward()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    compiled(ours)
    lazyxla.sync()
    with counted() as n:
        result = compiled(ours)
        result.backward()
        lazyxla.sync(wait=True)
    assert (n.executions, n.fallbacks, n.compiles) == (1, 0, 1)
    assert n.host_calls > 0
    assert_same(result, expected)
    assert_same(ours.grad, theirs.grad)


def test_strict_mode_allows_it(run_python: Any) -> None:
    run_python(
        """
import torch, lazyxla
a = torch.randn(3, 3)
torch.testing.assert_close(torch.linalg.svdvals(a.to("lazyxla")).cpu(), torch.linalg.svdvals(a))
assert lazyxla.counters()["host_calls"] == 1 and lazyxla.fallbacks() == {}
""",
        LAZYXLA_STRICT="1",
    )


@pytest.mark.parametrize("device", ["lazyxla:0", "lazyxla:1"])
def test_many_calls_at_once(device: str) -> None:
    """Independent calls may run on several of the plugin's threads, each using PyTorch's own."""
    matrices = [matrix(60, 60) for _ in range(12)]
    results = [torch.linalg.svdvals(a.to(device)) for a in matrices]
    lazyxla.sync()
    for result, a in zip(results, matrices, strict=True):
        torch.testing.assert_close(result.cpu(), torch.linalg.svdvals(a))


def test_calls_from_several_threads() -> None:
    a = matrix(30, 30)
    expected = torch.linalg.svdvals(a)
    results: list[torch.Tensor] = []

    def work(number: int) -> None:
        for _ in range(5):
            results.append(torch.linalg.svdvals(a.to(f"lazyxla:{number % 2}")).cpu())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20
    for result in results:
        torch.testing.assert_close(result, expected)


def test_user_modes_are_not_seen_by_the_kernel() -> None:
    a = square(torch.float32)
    with torch.autocast(DEVICE), torch.device(DEVICE):
        result = torch.linalg.slogdet(a.to(DEVICE))
        lazyxla.sync(wait=True)
    assert_same(result, torch.linalg.slogdet(a))


# --- Gradients -----------------------------------------------------------------------------------

DIFFERENTIABLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "svdvals": lambda a: torch.linalg.svdvals(a),
    "svd": lambda a: torch.linalg.svd(a, full_matrices=False)[0].abs(),
    "eigh": lambda a: torch.linalg.eigh(a + a.mT)[1].abs(),
    "det": torch.linalg.det,
    "slogdet": lambda a: torch.linalg.slogdet(a)[1],
    "inv": lambda a: torch.linalg.inv_ex(a)[0],
    "solve": lambda a: torch.linalg.solve_ex(a, a.cos())[0],
    "qr": lambda a: torch.linalg.qr(a).R,
    "lu": lambda a: torch.linalg.lu(a).U,
    "matrix_exp": lambda a: torch.linalg.matrix_exp(a / 4),
    "pinv": torch.linalg.pinv,
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(name: str) -> None:
    def gradient(a: torch.Tensor) -> torch.Tensor:
        a = a.detach().requires_grad_()
        DIFFERENTIABLE[name](a).square().sum().backward()
        assert a.grad is not None
        return a.grad

    in_one_program(gradient, square(torch.float64, 2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["det", "slogdet"])
def test_gradients_of_determinants(name: str, transposed: bool, dtype: torch.dtype) -> None:
    """PyTorch's formula expects another LU decomposition for a matrix that is not contiguous."""
    lazyxla.reset_counters()
    x = torch.randn(3, 4, 4, dtype=dtype)
    gradients = []
    for device in ("cpu", "lazyxla"):
        a = x.to(device)
        a = (a.mT if transposed else a).detach().requires_grad_()
        result = getattr(torch.linalg, name)(a)
        loss = result.abs().sum() if name == "det" else result[1].sum()
        loss.backward()
        gradients.append(a.grad)
    torch.testing.assert_close(gradients[1].cpu(), gradients[0], check_stride=False)
    assert lazyxla.fallbacks() == {}
