"""Cholesky's decomposition and triangular systems, for which XLA has operations.

Programs for the CPU decompose with PyTorch's kernel (host_call.py), which finds the minor that is
not positive definite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.functions import conj, where
from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


@rule("aten::linalg_cholesky_ex", platforms=("cuda", "tpu"))
def cholesky_ex(b: Builder, x: Value, upper: bool, check_errors: bool) -> tuple[Value, Value]:
    factor = cholesky(b, x, upper)
    diagonal = where(_rows(b, factor) == _columns(b, factor), factor, 0).sum([-1])
    if diagonal.is_complex:
        diagonal = diagonal.real
    # XLA reports a matrix that is not positive definite as nan, without the failing minor's number,
    # but takes the root of a zero.
    good = b.reduce(diagonal > 0, [-1], "and")
    return factor, (~good).to(torch.int32)


@rule("aten::cholesky", platforms=("cuda", "tpu"))
def cholesky(b: Builder, x: Value, upper: bool) -> Value:
    factor = b.hlo.cholesky(_adjoint(b, x) if upper else x, lower=True)
    factor = where(_rows(b, factor) >= _columns(b, factor), factor, 0)
    return _adjoint(b, factor) if upper else factor


@rule("aten::linalg_solve_triangular")
def solve_triangular(
    b: Builder, a: Value, y: Value, upper: bool, left: bool, unitriangular: bool
) -> Value:
    shape = b.outputs[0].shape
    a = b.broadcast_to(a, [*shape[:-2], *a.shape[-2:]])
    y = b.broadcast_to(y.to(a.dtype), shape)
    return _solve(b, a, y, left, not upper, unitriangular, "NO_TRANSPOSE")


@rule("aten::triangular_solve")
def triangular_solve(
    b: Builder, y: Value, a: Value, upper: bool, transpose: bool, unitriangular: bool
) -> tuple[Value, Value]:
    solution, copy = b.outputs
    a, y = b.broadcast_to(a, copy.shape), b.broadcast_to(y, solution.shape)
    kind = "TRANSPOSE" if transpose else "NO_TRANSPOSE"
    return _solve(b, a, y, True, not upper, unitriangular, kind), a


@rule("aten::cholesky_solve")
def cholesky_solve(b: Builder, y: Value, factor: Value, upper: bool) -> Value:
    shape = b.outputs[0].shape
    factor = b.broadcast_to(factor, [*shape[:-2], *factor.shape[-2:]])
    y = b.broadcast_to(y, shape)
    kinds = ("ADJOINT", "NO_TRANSPOSE") if upper else ("NO_TRANSPOSE", "ADJOINT")
    for kind in kinds:
        y = _solve(b, factor, y, True, not upper, False, kind)
    return y


def _solve(b: Builder, a: Value, y: Value, left: bool, lower: bool, unit: bool, kind: str) -> Value:
    return b.hlo.triangular_solve(a, y, left, lower, unit, b.hlo.TransposeAttr.get(kind))


def _adjoint(b: Builder, x: Value) -> Value:
    return b.swap(conj(x), -2, -1)


def _rows(b: Builder, x: Value) -> Value:
    """The row of each element."""
    return b.iota(x.shape, x.rank - 2, torch.int32)


def _columns(b: Builder, x: Value) -> Value:
    """The column of each element."""
    return b.iota(x.shape, x.rank - 1, torch.int32)
