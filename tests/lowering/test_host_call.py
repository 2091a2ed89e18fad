"""Host calls: PyTorch's CPU kernels within a program, for operators without an XLA form."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyxla
from lazyxla.dynamo import backend
from lazyxla.lowering import how
from tests.support import DEVICE, assert_same, check, counted, error_of, on_device

REAL = [torch.float32, torch.float64]
FLOATING = [*REAL, torch.complex64, torch.complex128]


def _matrix(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype)


def _square(dtype: torch.dtype = torch.float64, *batch: int) -> torch.Tensor:
    """Well-conditioned matrices."""
    return _matrix(*batch, 4, 4, dtype=dtype) + 4 * torch.eye(4, dtype=dtype)


def _hermitian(dtype: torch.dtype = torch.float64, *batch: int) -> torch.Tensor:
    a = _square(dtype, *batch)
    return a + a.mH


def in_one_program(function: Callable[..., Any], *args: Any, strides: bool = True) -> Any:
    """`check`, and that the function is one program with host calls in it and no fallbacks."""
    ours = on_device(args)
    lazyxla.sync()
    with counted() as n:
        kept = function(*ours)  # alive: dead code does not run
        lazyxla.sync(wait=True)
    assert n.executions == 1
    assert n.fallbacks == n.downloads == 0
    assert n.host_calls > 0
    del kept
    return check(function, *args, strides=strides)


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
    in_one_program(UNIQUE[name], _square(dtype, 3))


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (2, 3, 5), (0, 3), (2, 0, 3, 3)], ids=str)
@pytest.mark.parametrize("full", [False, True])
def test_svd(shape: tuple[int, ...], full: bool, dtype: torch.dtype) -> None:
    a = _matrix(*shape, dtype=dtype)
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
    a = _hermitian(dtype, 2)
    values, vectors = torch.linalg.eigh(a.to(DEVICE))
    assert_same(values, torch.linalg.eigvalsh(a))
    rebuilt = (vectors * values.unsqueeze(-2)) @ vectors.mH
    torch.testing.assert_close(rebuilt.cpu(), a)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_eig(dtype: torch.dtype) -> None:
    a = _square(dtype, 2)
    values, vectors = torch.linalg.eig(a.to(DEVICE))
    assert values.is_complex()
    rebuilt = vectors @ torch.diag_embed(values) @ torch.linalg.inv_ex(vectors)[0]
    torch.testing.assert_close(rebuilt.cpu(), a.to(values.dtype))


def test_what_surrounds_a_call_is_in_its_program() -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        b = (a * 2).tanh().mT
        return torch.linalg.svdvals(b).log().sum() + torch.linalg.det(b[:2, :2])

    with counted() as n:
        in_one_program(function, _square())
    assert n.host_calls == 4  # twice two: in_one_program runs it twice


def test_views_and_writes() -> None:
    def function(a: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        torch.linalg.inv_ex(
            a[::2, ::2], out=(out[0], torch.empty(0, dtype=torch.int32).to(a.device))
        )
        out[1].copy_(torch.linalg.qr(a.mT[1:3, 1:3]).Q)
        return out.sum(0)

    check(function, _matrix(4, 4), torch.zeros(2, 2, 2, dtype=torch.float64))


# The result, and as bool where it was not clamped.
_fake_quantize = torch.ops.aten.fake_quantize_per_tensor_affine_cachemask

OTHERS: dict[str, Callable[..., Any]] = {
    "float list": lambda x: torch.histogram(x, 4, range=(-1.0, 1.0), density=True),
    "tensors": lambda x: torch.histogram(x, torch.tensor([-1.0, 0.0, 0.5, 2.0]).to(x.device)),
    "number and tensors": lambda x: torch.fake_quantize_per_channel_affine(
        x.reshape(2, 3),
        torch.tensor([0.1, 0.2]).to(x.device),
        torch.tensor([1, 0], dtype=torch.int32).to(x.device),
        0,
        0,
        7,
    ),
    "numbers": lambda x: _fake_quantize(x, 0.1, 1, 0, 7),
}


@pytest.mark.parametrize("name", OTHERS)
def test_arguments_of_all_kinds(name: str) -> None:
    in_one_program(OTHERS[name], torch.linspace(-1.5, 2, 6))


def test_a_number_that_changes_is_an_input() -> None:
    x = torch.linspace(-2, 2, 6)
    ours = on_device(x)
    compiles = []
    for scale in (0.1, 0.2, 0.3, 0.4, 0.5):
        with counted() as n:
            assert_same(_fake_quantize(ours, scale, 0, -8, 7), _fake_quantize(x, scale, 0, -8, 7))
        assert n.host_calls == 1
        compiles.append(n.compiles)
    assert compiles[0] == 1
    assert compiles[2:] == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_dtypes_of_operands_and_results(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 0, 1, 3]).to(dtype)
    in_one_program(lambda t: torch._convert_indices_from_coo_to_csr(t, 4), x)


# --- Modes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, "fused"])
def test_eager_modes(mode: Any) -> None:
    lazyxla.reset_counters()
    a = _square()
    with lazyxla.eager_mode(mode):
        for _ in range(3):
            check(lambda a: torch.linalg.slogdet(a @ a), a)
        assert lazyxla.fallbacks() == {}


def test_within_a_full_graph() -> None:
    @lazyxla.compile(full_graph=True)
    def function(a: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(a + 1).sum() * 2

    a = _square()
    with counted() as n:
        result = function(a.to(DEVICE))
        lazyxla.sync(wait=True)
    assert (n.executions, n.host_calls, n.fallbacks) == (1, 1, 0)
    assert_same(result, torch.linalg.svdvals(a + 1).sum() * 2)


@pytest.mark.usefixtures("fresh_dynamo")
def test_within_a_traced_graph() -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(a.tanh()).square().sum() + a.mean()

    theirs = _matrix(4, 3).requires_grad_()
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
    matrices = [_matrix(60, 60) for _ in range(12)]
    results = [torch.linalg.svdvals(a.to(device)) for a in matrices]
    lazyxla.sync()
    for result, a in zip(results, matrices, strict=True):
        torch.testing.assert_close(result.cpu(), torch.linalg.svdvals(a))


def test_calls_from_several_threads() -> None:
    a = _matrix(30, 30)
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
    a = _square(torch.float32)
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

    in_one_program(gradient, _square(torch.float64, 2))


# --- Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [torch.linalg.inv, lambda a: torch.linalg.solve(a, a)])
def test_errors_that_pytorch_reads_from_info_are_its_own(function: Callable[..., Any]) -> None:
    singular = torch.ones(3, 3)
    assert error_of(function, singular.to(DEVICE)) == error_of(function, singular)
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        function(singular.to(DEVICE))


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
    check(torch.linalg.svdvals, _square())


def test_an_error_on_the_plugins_threads() -> None:
    """A program with much else to do goes on behind the call that starts it."""
    large = torch.randn(500, 500).to(DEVICE)
    values = torch.linalg.svdvals((large @ large)[:3, :3] * float("nan"))
    lazyxla.sync()
    with pytest.raises(RuntimeError, match=r"aten::_linalg_svd: linalg\.svd: The algorithm failed"):
        values.cpu()
    lazyxla.sync(wait=True)  # it is told once
    check(torch.linalg.svdvals, _square())


@pytest.mark.usefixtures("fresh_dynamo")
def test_errors_in_a_traced_graph() -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(a * 2) + 1

    compiled = torch.compile(function, backend=backend)
    a = _square()
    assert_same(compiled(a.to(DEVICE)), function(a), strides=False)
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        compiled(torch.ones(4, 4, dtype=a.dtype).to(DEVICE))


def test_the_ex_forms_need_no_read() -> None:
    def function(a: torch.Tensor) -> Any:
        return torch.linalg.inv_ex(a, check_errors=False)

    _, info = in_one_program(function, _square())
    assert info.item() == 0
    with counted() as n:
        torch.linalg.inv(on_device(_square()))
    assert n.downloads == 1


# --- What is called, and what is not -------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten::_linalg_svd", "call"),
        ("aten::linalg_qr", "call"),
        ("aten::linalg_lstsq", "host"),  # the shape of its rank depends on data
        ("aten::nonzero", "host"),
        ("aten::quantize_per_tensor", "host"),  # XLA has no such dtype
        ("aten::_linalg_check_errors", "host"),  # returns nothing
        ("aten::rand_like.generator", "host"),  # random
        ("aten::_local_scalar_dense", "host"),  # returns a number
        ("aten::values", "host"),  # a view
        ("aten::linalg_inv_ex.inverse", "host"),  # writes
        ("lazyxla_tests::not_there", "host"),
    ],
)
def test_which_operators_are_called(name: str, expected: str) -> None:
    assert how(name) == expected


def test_operators_of_users_with_python_kernels_run_outside() -> None:
    @torch.library.custom_op("lazyxla_tests::cube", mutates_args=(), device_types="cpu")
    def cube(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() ** 3)

    @cube.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    assert how("lazyxla_tests::cube") == "host"
    x = torch.arange(3.0)
    with counted() as n:
        assert_same(cube(x.to(DEVICE) + 1), cube(x + 1))
    assert (n.fallbacks, n.host_calls) == (1, 0)


_SCALE = """
#include <ATen/ATen.h>
#include <torch/library.h>
at::Tensor scale(const at::Tensor& x, double by) { return x * by; }
TORCH_LIBRARY(lazyxla_tests_compiled, m) { m.def("scale(Tensor x, float by=3.0) -> Tensor"); }
TORCH_LIBRARY_IMPL(lazyxla_tests_compiled, CPU, m) { m.impl("scale", scale); }
"""


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_operators_of_users_with_compiled_kernels_run_within(tmp_path: Path) -> None:
    (tmp_path / "scale.cpp").write_text(_SCALE)
    root = Path(torch.__file__).parent
    flags = ["-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}", f"-L{root / 'lib'}"]
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
    command = ["c++", *flags, "scale.cpp", "-o", "scale.so", "-ltorch_cpu", "-lc10"]
    subprocess.run(command, cwd=tmp_path, check=True)
    torch.ops.load_library(tmp_path / "scale.so")
    scale = torch.ops.lazyxla_tests_compiled.scale

    @torch.library.register_fake("lazyxla_tests_compiled::scale")
    def _(x: torch.Tensor, by: float = 3.0) -> torch.Tensor:
        return torch.empty_like(x)

    for by in (3.0, 2.5):
        in_one_program(lambda x, by=by: scale(x + 1, by), torch.arange(4.0))


def test_sparse_results_do_not_exist_here() -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match=r"(?i)sparse"):
        torch.eye(3).to(DEVICE).to_sparse()


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
