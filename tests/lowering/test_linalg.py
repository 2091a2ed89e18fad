"""Linear algebra of TPU and CUDA: its rules' values, and which of XLA's decompositions they use.

The compiler's LU decomposition exists on the TPU only, so values come from the rules on JAX arrays
with LAPACK below them; those that need none are also run as they are lowered for the TPU, since
XLA expands them on the CPU, too. What is lowered for CUDA runs on the CPU as a whole.
"""

import inspect
import re
from typing import Any, NamedTuple

import pytest
import torch

from lazyxla.lowering import lookup, lower_to_text, registry
from tests.lowering.harness import (
    _flatten,
    _in_schema_order,
    execute,
    find_op,
    record,
    to_numpy,
    to_torch,
)

DTYPES = [torch.float32, torch.float64, torch.complex64]


def random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype)


def positive(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    x = random(*shape, dtype=dtype)
    return x @ x.mH + torch.eye(shape[-1], dtype=dtype)


def by_jax(op: str, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """What the operator's rule for the TPU computes on JAX's CPU."""
    import jax

    recorded = record(op, *args, **kwargs)  # sets JAX up for 64-bit types by way of the harness
    rule = registry.find_jax_rule(op, "tpu")
    assert rule is not None
    static = dict(enumerate(_in_schema_order(find_op(op), args, kwargs)))
    arrays = {i: to_numpy(x) for i, x in static.items() if isinstance(x, torch.Tensor)}
    more = {}
    if "outputs" in inspect.signature(rule.function).parameters:
        more["outputs"] = recorded.program.nodes[0].outputs

    def call(*operands: Any) -> Any:
        given = {**static, **dict(zip(arrays, operands, strict=True))}
        return rule.function(*given.values(), **more)

    with jax.enable_x64(True):
        results = jax.jit(call)(*arrays.values())
    flat = results if isinstance(results, tuple) else (results,)
    return [to_torch(x, t.dtype) for x, t in zip(flat, recorded.expected, strict=True)]


def custom_calls(name: str, platform: str) -> set[str]:
    """What the program of a case calls by name."""
    op, args, kwargs = UNIQUE[name]
    text = lower_to_text(record(op, *args, **kwargs).program, platform)
    return set(re.findall(r"custom_call @(\w+)", text))


class Case(NamedTuple):
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def case(op: str, *args: Any, **kwargs: Any) -> Case:
    return Case(op, args, kwargs)


SINGULAR = torch.tensor([[1.0, 2.0], [2.0, 4.0]], dtype=torch.float64)

# Results that are the same whoever computes them. Batches have two dimensions, none as long as a
# matrix: whoever counts a dimension from the wrong end meets another.
UNIQUE = {
    "det": case("aten::_linalg_det", random(5, 2, 4, 4)),
    "det of nothing": case("aten::_linalg_det", random(0, 0)),
    "det of a singular matrix": case("aten::_linalg_det", torch.zeros(2, 2)),
    "slogdet": case("aten::_linalg_slogdet", random(3, 2, 4, 4)),
    "complex slogdet": case("aten::_linalg_slogdet", random(2, 5, 3, 3, dtype=torch.complex128)),
    "slogdet of a singular matrix": case("aten::_linalg_slogdet", SINGULAR),
    "lu_factor": case("aten::linalg_lu_factor_ex", random(2, 3, 4, 4)),
    "lu_factor of a high matrix": case("aten::linalg_lu_factor_ex", random(5, 3)),
    "lu_factor of a singular matrix": case("aten::linalg_lu_factor_ex", SINGULAR),
    "lu": case("aten::linalg_lu", random(2, 3, 4, 4)),
    "lu of a wide matrix": case("aten::linalg_lu", random(3, 5)),
    "lu of a high matrix": case("aten::linalg_lu", random(5, 3)),
    "solve": case("aten::_linalg_solve_ex", random(2, 3, 4, 4), random(2, 3, 4, 3)),
    "solve for a vector": case("aten::_linalg_solve_ex", random(4, 4), random(4)),
    "solve for vectors": case("aten::_linalg_solve_ex", random(2, 3, 4, 4), random(2, 3, 4)),
    "solve from the right": case(
        "aten::_linalg_solve_ex",
        random(4, 4, dtype=torch.complex128),
        random(3, 4, dtype=torch.complex128),
        left=False,
    ),
    "inverse": case("aten::linalg_inv_ex", random(2, 3, 4, 4)),
    "matrix_exp": case("aten::linalg_matrix_exp", random(2, 3, 4, 4)),
    "cholesky_inverse": case(
        "aten::cholesky_inverse", torch.linalg.cholesky(positive(4, 4, dtype=torch.complex128))
    ),
    "cholesky_inverse, upper": case(
        "aten::cholesky_inverse", torch.linalg.cholesky(positive(4, 4)).mT, True
    ),
    "qr": case("aten::linalg_qr", random(2, 4, 5, 3)),
    "complete qr": case("aten::linalg_qr", random(5, 3), "complete"),
    "r of qr": case("aten::linalg_qr", random(3, 5), "r"),
    "householder_product": case("aten::linalg_householder_product", *torch.geqrf(random(5, 3))),
    "eigenvalues": case("aten::_linalg_eigh", positive(2, 3, 4, 4), "U", False),
    "singular values": case("aten::_linalg_svd", random(2, 3, 4, 3), False, False),
}


@pytest.mark.parametrize("name", UNIQUE)
def test_values(name: str) -> None:
    op, args, kwargs = UNIQUE[name]
    results = by_jax(op, *args, **kwargs)
    for ours, theirs in zip(results, _flatten(find_op(op)(*args, **kwargs)), strict=True):
        torch.testing.assert_close(ours, theirs, check_stride=False)


ON_THE_HOST = {"eigenvalues", "singular values"}
"""What XLA does not compute well enough on CUDA."""


@pytest.mark.parametrize("name", [name for name in UNIQUE if name not in ON_THE_HOST])
def test_values_as_lowered_for_cuda(name: str) -> None:
    op, args, kwargs = UNIQUE[name]
    recorded = record(op, *args, **kwargs)
    results = execute(recorded.program, recorded.inputs, "cuda")[0]
    for ours, theirs in zip(results, recorded.expected, strict=True):
        torch.testing.assert_close(ours, theirs, check_stride=False)


@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_lu_solve(left: bool, adjoint: bool) -> None:
    factors, pivots, _ = torch.linalg.lu_factor_ex(random(2, 5, 3, 3, dtype=torch.complex128))
    b = random(2, 5, 3, 4, dtype=torch.complex128)
    args = (factors, pivots, b if left else b.mT.contiguous())
    (ours,) = by_jax("aten::linalg_lu_solve", *args, left=left, adjoint=adjoint)
    theirs = torch.linalg.lu_solve(*args, left=left, adjoint=adjoint)
    torch.testing.assert_close(ours, theirs, check_stride=False)


@pytest.mark.parametrize("triangle", ["L", "U"])
def test_eigenvectors(triangle: str) -> None:
    """Only the triangle that is asked for is read."""
    a = positive(2, 4, 4, dtype=torch.complex128)
    read = a.tril() if triangle == "L" else a.triu()
    values, vectors = by_jax("aten::_linalg_eigh", read, triangle, True)
    torch.testing.assert_close(values, torch.linalg.eigvalsh(a))
    torch.testing.assert_close(vectors @ torch.diag_embed(values + 0j) @ vectors.mH, a)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("shape", [(4, 4), (2, 5, 3), (2, 3, 5), (2, 0, 3)])
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_singular_vectors(
    full: bool, shape: tuple[int, ...], rank: int, dtype: torch.dtype
) -> None:
    lead, rows, columns, least = shape[:-2], shape[-2], shape[-1], min(shape[-2:])
    rank = min(rank, least)
    a = random(*lead, rows, rank, dtype=dtype) @ random(*lead, rank, columns, dtype=dtype)
    left, values, right = by_jax("aten::_linalg_svd", a, full, True)
    assert left.shape == (*lead, rows, rows if full else least)
    assert right.shape == (*lead, columns if full else least, columns)
    torch.testing.assert_close(values, torch.linalg.svdvals(a))
    product = left[..., :least] @ torch.diag_embed(values).to(dtype) @ right[..., :least, :]
    torch.testing.assert_close(product, a)
    for unitary in (left, right.mH):
        square = unitary.mH @ unitary
        torch.testing.assert_close(square, torch.eye(square.shape[-1]).expand_as(square).to(dtype))


def test_without_pivots_is_an_error() -> None:
    rule = registry.find_jax_rule("aten::linalg_lu_factor_ex", "tpu")
    assert rule is not None
    with pytest.raises(NotImplementedError, match="without pivoting"):
        rule.function(torch.eye(3), False, False)


CALLS = {
    "det": {"LuDecomposition"},
    "solve": {"LuDecomposition"},
    "inverse": {"LuDecomposition"},
    "matrix_exp": {"LuDecomposition"},
    "cholesky_inverse": set(),
    "qr": {"Qr", "ProductOfElementaryHouseholderReflectors"},
    "householder_product": {"ProductOfElementaryHouseholderReflectors"},
    "eigenvalues": {"Eigh"},
    "singular values": {"Eigh", "Qr", "ProductOfElementaryHouseholderReflectors"},
}


@pytest.mark.parametrize("name", CALLS)
def test_what_the_compiler_is_asked_for(name: str) -> None:
    assert custom_calls(name, "tpu") == CALLS[name]
    if name not in ON_THE_HOST:
        assert custom_calls(name, "cuda") == CALLS[name] - {"LuDecomposition"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_qr_as_lowered_for_the_tpu(dtype: torch.dtype) -> None:
    a = random(2, 5, 3, dtype=torch.complex128).to(dtype)
    recorded = record("aten::linalg_qr", a)
    q, r = execute(recorded.program, recorded.inputs, "tpu")[0]
    torch.testing.assert_close(q @ r, a)
    torch.testing.assert_close(q.mH @ q, torch.eye(3, dtype=dtype).expand(2, 3, 3))
    assert torch.equal(r, r.triu())


@pytest.mark.parametrize("dtype", DTYPES)
def test_eigh_as_lowered_for_the_tpu(dtype: torch.dtype) -> None:
    a = positive(2, 4, 4, dtype=torch.complex128).to(dtype)
    recorded = record("aten::_linalg_eigh", a, "L", True)
    values, vectors = execute(recorded.program, recorded.inputs, "tpu")[0]
    # The Jacobi method stops at 1e-4 (float32) of the norm, which is 20 here.
    tolerances = {"rtol": 1e-4, "atol": 2e-3} if dtype != torch.float64 else {}
    together = vectors @ torch.diag_embed(values).to(dtype) @ vectors.mH
    torch.testing.assert_close(together, a, **tolerances)


def test_where_they_run() -> None:
    on_the_host = {UNIQUE[name].op for name in ON_THE_HOST}
    names = {op for op, *_ in UNIQUE.values()} | {"aten::linalg_lu_solve"}
    for name in names:
        assert registry.find_jax_rule(name, "tpu") is not None
        assert (registry.find_jax_rule(name, "cuda") is None) == (name in on_the_host)
        assert registry.find_jax_rule(name, "cpu") is None
        assert lookup.how(name) == "call"  # these tests run on the CPU
