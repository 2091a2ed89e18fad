"""Factorisations and what is solved by them, on platforms without LAPACK: TPU and CUDA.

XLA's TPU compiler has LU, QR and symmetric eigenvalue decompositions, and JAX composes the rest of
them. For CUDA XLA expands QR and Cholesky, and JAX composes LU; the eigenvalues that XLA computes
there are good to 1e-4 only, in float32, so that eigh and svd run on the host. Programs for the CPU
call LAPACK through PyTorch's own kernels instead (host_call.py).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.registry import jax_rule

if TYPE_CHECKING:
    from jax import Array

_on_tpu = functools.partial(jax_rule, platforms=("tpu",))
_on_accelerators = functools.partial(jax_rule, platforms=("cuda", "tpu"))


def _adjoint(x: Array) -> Array:
    return x.conj().swapaxes(-1, -2)


def _diagonal(x: Array) -> Array:
    import jax.numpy as jnp

    return jnp.diagonal(x, axis1=-2, axis2=-1)


def _eye(size: int, like: Array) -> Array:
    import jax.numpy as jnp

    return jnp.broadcast_to(jnp.eye(size, dtype=like.dtype), (*like.shape[:-2], size, size))


def _lu(a: Array) -> tuple[Array, Array, Array]:
    """LU in one array, LAPACK's pivots (from 1), and the first zero pivot (0: none)."""
    import jax
    import jax.numpy as jnp

    lu, pivots, _ = jax.lax.linalg.lu(a)
    zero = _diagonal(lu) == 0
    first = jnp.argmax(zero, axis=-1) + 1 if zero.shape[-1] else jnp.zeros(a.shape[:-2])
    info = jnp.where(zero.any(axis=-1), first, 0)
    return lu, pivots.astype(jnp.int32) + 1, info.astype(jnp.int32)


def _permutation(pivots: Array, size: int) -> Array:
    import jax

    return jax.lax.linalg.lu_pivots_to_permutation(pivots - 1, size)


def _triangular(
    a: Array, b: Array, *, lower: bool, unit: bool = False, adjoint: bool = False
) -> Array:
    import jax

    return jax.lax.linalg.triangular_solve(
        a,
        b,
        left_side=True,
        lower=lower,
        unit_diagonal=unit,
        transpose_a=adjoint,
        conjugate_a=adjoint,
    )


def _solve(lu: Array, pivots: Array, b: Array, left: bool, adjoint: bool) -> Array:
    """x of `a x = b` (`x a = b` if not `left`), of the adjoint of `a` if `adjoint`; all batched."""
    import jax.numpy as jnp

    if not left:
        return _adjoint(_solve(lu, pivots, _adjoint(b), True, not adjoint))
    lead = jnp.broadcast_shapes(lu.shape[:-2], b.shape[:-2])
    lu = jnp.broadcast_to(lu, (*lead, *lu.shape[-2:]))
    b = jnp.broadcast_to(b, (*lead, *b.shape[-2:]))
    order = jnp.broadcast_to(_permutation(pivots, lu.shape[-1]), (*lead, lu.shape[-1]))
    if adjoint:
        x = _triangular(lu, b, lower=False, adjoint=True)
        x = _triangular(lu, x, lower=True, unit=True, adjoint=True)
        back = jnp.argsort(order, axis=-1)
        return jnp.take_along_axis(x, back[..., None], axis=-2)
    x = jnp.take_along_axis(b, order[..., None], axis=-2)
    x = _triangular(lu, x, lower=True, unit=True)
    return _triangular(lu, x, lower=False)


def _sign_of_permutation(pivots: Array) -> Array:
    import jax.numpy as jnp

    moved = pivots != jnp.arange(1, pivots.shape[-1] + 1)
    return 1 - 2 * (moved.sum(axis=-1) % 2)


def _lu_of_determinant(a: Array) -> tuple[Array, Array]:
    """For a real matrix the LU of the transposed one: see lazyxla/determinant.py."""
    import jax.numpy as jnp

    return _lu(a if jnp.iscomplexobj(a) else a.swapaxes(-1, -2))[:2]


@_on_accelerators("aten::_linalg_det")
def det(a: Array) -> tuple[Array, ...]:
    lu, pivots = _lu_of_determinant(a)
    return _diagonal(lu).prod(axis=-1) * _sign_of_permutation(pivots), lu, pivots


@_on_accelerators("aten::_linalg_slogdet")
def slogdet(a: Array) -> tuple[Array, ...]:
    import jax.numpy as jnp

    lu, pivots = _lu_of_determinant(a)
    diagonal = _diagonal(lu)
    size = jnp.abs(diagonal)
    phase = jnp.where(size == 0, 0, diagonal / jnp.where(size == 0, 1, size))
    sign = phase.prod(axis=-1) * _sign_of_permutation(pivots)
    return sign, jnp.log(size).sum(axis=-1), lu, pivots


@_on_accelerators("aten::linalg_lu_factor_ex")
def lu_factor(a: Array, pivot: bool, check_errors: bool) -> tuple[Array, ...]:
    if not pivot:
        raise NotImplementedError("LU decomposition without pivoting")
    return _lu(a)


@_on_accelerators("aten::linalg_lu")
def lu(a: Array, pivot: bool) -> tuple[Array, ...]:
    import jax.numpy as jnp

    both, pivots, _ = lu_factor(a, pivot, False)
    rows, columns = a.shape[-2:]
    rank = min(rows, columns)
    lower = jnp.tril(both[..., :rank], -1) + jnp.eye(rows, rank, dtype=a.dtype)
    order = _permutation(pivots, rows)
    permutation = order[..., None, :] == jnp.arange(rows)[:, None]
    return permutation.astype(a.dtype), lower, jnp.triu(both[..., :rank, :])


@_on_accelerators("aten::linalg_lu_solve")
def lu_solve(factors: Array, pivots: Array, b: Array, left: bool, adjoint: bool) -> Array:
    return _solve(factors, pivots, b, left, adjoint)


@_on_accelerators("aten::_linalg_solve_ex")
def solve(a: Array, b: Array, left: bool, check_errors: bool) -> tuple[Array, ...]:
    factors, pivots, info = _lu(a)
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    x = _solve(factors, pivots, b[..., None] if vector else b, left, False)
    return x[..., 0] if vector else x, factors, pivots, info


@_on_accelerators("aten::linalg_inv_ex")
def inverse(a: Array, check_errors: bool) -> tuple[Array, Array]:
    factors, pivots, info = _lu(a)
    return _solve(factors, pivots, _eye(a.shape[-1], a), True, False), info


@_on_accelerators("aten::linalg_matrix_exp")
def matrix_exp(a: Array) -> Array:
    """By scaling, squaring and a Pade approximant (Higham 2005), as in jax.scipy.linalg.expm."""
    import jax
    import jax.numpy as jnp

    half = a.dtype in (jnp.bfloat16, jnp.float16)  # which JAX does not take
    return jax.scipy.linalg.expm(a.astype(jnp.float32) if half else a)


@_on_accelerators("aten::cholesky_inverse")
def cholesky_inverse(factor: Array, upper: bool) -> Array:
    lower = _adjoint(factor) if upper else factor
    below = _triangular(lower, _eye(lower.shape[-1], lower), lower=True)
    return _adjoint(below) @ below


@_on_accelerators("aten::linalg_qr")
def qr(a: Array, mode: str, *, outputs: tuple[TensorSpec, ...]) -> tuple[Array, Array]:
    import jax
    import jax.numpy as jnp

    q, r = jax.lax.linalg.qr(a, full_matrices=mode == "complete")
    return jnp.zeros(outputs[0].shape, a.dtype) if mode == "r" else q, r


@_on_accelerators("aten::linalg_householder_product")
def householder_product(reflectors: Array, tau: Array) -> Array:
    import jax

    return jax.lax.linalg.householder_product(reflectors, tau)


@_on_tpu("aten::_linalg_eigh")
def eigh(
    a: Array, triangle: str, compute_vectors: bool, *, outputs: tuple[TensorSpec, ...]
) -> tuple[Array, Array]:
    import jax
    import jax.numpy as jnp

    lower = triangle.upper() == "L"
    vectors, values = jax.lax.linalg.eigh(a, lower=lower, symmetrize_input=False)
    return values, vectors if compute_vectors else jnp.zeros(outputs[1].shape, a.dtype)


def _svd_of_tall(a: Array) -> tuple[Array, Array, Array]:
    """The thin decomposition of one matrix with as many rows as columns, or more.

    By the polar decomposition and its Hermitian part's eigenvalues, as in Nakatsukasa and Higham,
    "Stable and efficient spectral divide and conquer algorithms for the symmetric eigenvalue
    decomposition and the SVD", 2013. JAX has the same for the TPU, but multiplies a float matrix by
    an int64 one in it, which XLA's TPU compiler refuses ("rewriting computation to not contain
    X{64|128} element types").
    """
    import jax
    import jax.numpy as jnp

    with jax.default_matmul_precision("float32"):
        unitary, hermitian, _, _ = jax.lax.linalg.qdwh(a, is_hermitian=False)
        vectors, values = jax.lax.linalg.eigh(hermitian, sort_eigenvalues=False)
        order = jnp.argsort(values, descending=True)
        right = vectors[:, order]
        # Where the rank is not full the product is not unitary; its QR decomposition's Q is.
        left, r = jax.lax.linalg.qr(unitary @ right, full_matrices=False)
    size = jnp.abs(_diagonal(r))
    left = left * jnp.where(size == 0, 1, _diagonal(r) / jnp.where(size == 0, 1, size))
    return left, jnp.maximum(values, 0)[order], _adjoint(right)


def _svd_of_matrix(a: Array, full: bool) -> tuple[Array, Array, Array]:
    import jax
    import jax.numpy as jnp

    rows, columns = a.shape
    if rows < columns:
        left, values, right = _svd_of_matrix(_adjoint(a), full)
        return _adjoint(right), values, _adjoint(left)
    if rows == columns:
        return _svd_of_tall(a)
    q, r = jax.lax.linalg.qr(a, full_matrices=full)
    left, values, right = _svd_of_tall(r[:columns])
    thin = jnp.matmul(q[:, :columns], left, precision="highest")
    return jnp.concatenate([thin, q[:, columns:]], axis=1), values, right


@_on_tpu("aten::_linalg_svd")
def svd(
    a: Array,
    full_matrices: bool,
    compute_vectors: bool,
    driver: str | None,
    *,
    outputs: tuple[TensorSpec, ...],
) -> tuple[Array, ...]:
    import jax
    import jax.numpy as jnp

    if compute_vectors and 0 in a.shape:
        return tuple(jax.lax.linalg.svd(a, full_matrices=full_matrices))
    if compute_vectors:
        function = functools.partial(_svd_of_matrix, full=full_matrices)
        for _ in a.shape[:-2]:
            function = jax.vmap(function)
        return function(a)
    values = jax.lax.linalg.svd(a, full_matrices=False, compute_uv=False)
    left, right = (jnp.zeros(outputs[i].shape, a.dtype) for i in (0, 2))
    return left, values, right
