"""Kernels for sparse tensors, in place of PyTorch's that read memory (csrc/dispatch/sparse.cpp).

Each is made of operators on indices and values, which are recorded. What a kernel is not made for
(blocks, batches of compressed matrices, matrix products of two sparse ones, wrong arguments) runs
on the host, which also raises PyTorch's errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lazyxla import _C

_aten = torch.library.Library("aten", "IMPL")

Number = float | complex


def _is_dense(*tensors: Tensor) -> bool:
    return all(x.layout == torch.strided for x in tensors)


def _can_be_written(dtype: torch.dtype, out: Tensor) -> bool:
    return torch.can_cast(dtype, out.dtype) and out.device.type == "lazyxla"


class Entries(NamedTuple):
    """The stored elements of a matrix: row and column, int64 (n,), and values (n,) of each."""

    rows: Tensor
    columns: Tensor
    values: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> Entries | None:
        """None for blocks and batches."""
        if matrix.dim() != 2 or matrix.dense_dim() != 0:
            return None
        if matrix.layout == torch.sparse_coo:
            if matrix.sparse_dim() != 2:
                return None
            rows, columns = matrix._indices().unbind()
            return cls(rows, columns, matrix._values())
        is_by_rows = matrix.layout == torch.sparse_csr
        if is_by_rows:
            offsets, indices = matrix.crow_indices(), matrix.col_indices()
        elif matrix.layout == torch.sparse_csc:
            offsets, indices = matrix.ccol_indices(), matrix.row_indices()
        else:
            return None
        position = torch.arange(len(indices), device=indices.device)
        outer = torch.searchsorted(offsets.long(), position, right=True) - 1
        rows, columns = (outer, indices.long()) if is_by_rows else (indices.long(), outer)
        return cls(rows, columns, matrix.values())

    def transposed(self) -> Entries:
        return Entries(self.columns, self.rows, self.values)

    def matmul(self, dense: Tensor, rows: int) -> Tensor:
        """Of shape (rows, columns of the dense matrix)."""
        terms = self.values.unsqueeze(1) * dense.index_select(0, self.columns)
        return dense.new_zeros(rows, dense.shape[1]).index_add(0, self.rows, terms)


def _flat_index(indices: Tensor, sizes: torch.Size) -> Tensor:
    """The row-major index, int64 (n,), of indices of shape (dimensions, n)."""
    flat = indices[0]
    for index, size in zip(indices[1:], sizes[1:], strict=True):
        flat = flat * size + index
    return flat


def _coalesce(x: Tensor) -> Any:
    if x.is_coalesced():
        return x
    dims = x.sparse_dim()
    if dims == 0:
        return NotImplemented
    sizes = x.shape[:dims]
    flat = _flat_index(x._indices(), sizes)
    kept, place = torch.unique(flat, sorted=True, return_inverse=True)
    values = x._values()
    sums = values.new_zeros(len(kept), *values.shape[1:]).index_add(0, place, values)
    indices = torch.stack(torch.unravel_index(kept, sizes))
    return _make(indices, sums, x.shape, is_coalesced=True)


def _make(indices: Tensor, values: Tensor, shape: torch.Size, is_coalesced: bool) -> Tensor:
    return torch.sparse_coo_tensor(
        indices, values, shape, is_coalesced=is_coalesced, check_invariants=False
    )


def _add_dense(x: Tensor, other: Tensor, alpha: Number, dtype: torch.dtype) -> Any:
    if other.layout != torch.sparse_coo:
        entries = Entries.of(other)
        if entries is None:
            return NotImplemented
        indices, values = torch.stack(entries[:2]), entries.values
    else:
        indices, values = other._indices(), other._values()
    dims = len(indices)
    if dims == 0:
        return NotImplemented
    base = x.to(dtype)
    if base.numel() == 0:
        return base
    rows = base.reshape(-1, *x.shape[dims:])
    flat = _flat_index(indices, other.shape[:dims])
    return rows.index_add(0, flat, values.to(dtype), alpha=alpha).reshape(x.shape)


def _add_sparse(x: Tensor, other: Tensor, alpha: Number, dtype: torch.dtype) -> Any:
    if (x.sparse_dim(), x.dense_dim()) != (other.sparse_dim(), other.dense_dim()):
        return NotImplemented
    # The operator checks alpha as PyTorch does.
    terms = torch.zeros_like(other._values(), dtype=dtype).add(other._values(), alpha=alpha)
    indices = torch.cat([x._indices(), other._indices()], 1)
    values = torch.cat([x._values().to(dtype), terms])
    total = _make(indices, values, x.shape, is_coalesced=False)
    if x.is_coalesced() and other.is_coalesced():
        return total.coalesce()
    return total


def _add_out(x: Tensor, other: Tensor | Number, *, alpha: Number = 1, out: Tensor) -> Any:
    if not isinstance(other, Tensor):
        return NotImplemented
    dtype = torch.promote_types(x.dtype, other.dtype)
    if x.shape != other.shape or not _can_be_written(dtype, out):
        return NotImplemented
    if _is_dense(x, out) and not _is_dense(other):
        total = _add_dense(x, other, alpha, dtype)
    elif {t.layout for t in (x, other, out)} == {torch.sparse_coo}:
        total = _add_sparse(x, other, alpha, dtype)
    else:
        return NotImplemented
    return _assign(out, total)


def _assign(out: Tensor, result: Any) -> Any:
    if result is NotImplemented:
        return result
    if out.layout == torch.strided and out.shape != result.shape:
        torch._prims_common.wrappers._maybe_resize_out(out, result.shape)
    return out.copy_(result)


def _matmul(a: Tensor, b: Tensor) -> Any:
    """The product of matrices of which one is sparse, as a dense one."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype:
        return NotImplemented
    if _is_dense(b):
        entries = Entries.of(a)
        return NotImplemented if entries is None else entries.matmul(b, len(a))
    entries = Entries.of(b) if _is_dense(a) else None
    if entries is None:
        return NotImplemented
    return entries.transposed().matmul(a.mT, b.shape[1]).mT.contiguous()


def _addmm(x: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Any:
    product = _matmul(a, b) if _is_dense(x) and x.dtype == a.dtype else NotImplemented
    if product is NotImplemented or x.dim() > 2:
        return NotImplemented
    if not (x.is_floating_point() or x.is_complex()) and {float} & {type(alpha), type(beta)}:
        return NotImplemented
    if any(n not in (1, m) for n, m in zip(x.shape[::-1], product.shape[::-1], strict=False)):
        return NotImplemented
    product = product * alpha
    return product if beta == 0 else x * beta + product


def _addmm_out(x: Tensor, a: Tensor, b: Tensor, *, out: Tensor, **factors: Number) -> Any:
    if not _is_dense(out) or out.dtype != a.dtype:
        return NotImplemented
    return _assign(out, _addmm(x, a, b, **factors))


def _addmm_(x: Tensor, a: Tensor, b: Tensor, **factors: Number) -> Any:
    if x.shape != (a.shape[0], b.shape[-1]):
        return NotImplemented
    return _assign(x, _addmm(x, a, b, **factors))


def _addmv_out(x: Tensor, a: Tensor, b: Tensor, *, out: Tensor, **factors: Number) -> Any:
    if b.dim() != 1 or x.dim() > 1 or not _is_dense(x, b, out):
        return NotImplemented
    result = _addmm(x.unsqueeze(-1), a, b.unsqueeze(1), **factors)
    return result if result is NotImplemented else _assign(out, result.squeeze(1))


def _bmm(a: Tensor, b: Tensor) -> Any:
    if a.layout != torch.sparse_coo or a.sparse_dim() != 3 or not _is_dense(b) or b.dim() != 3:
        return NotImplemented
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1] or a.dtype != b.dtype:
        return NotImplemented
    batch, rows, columns = a._indices().unbind()
    entries = Entries(batch * a.shape[1] + rows, batch * a.shape[2] + columns, a._values())
    product = entries.matmul(b.flatten(0, 1), a.shape[0] * a.shape[1])
    return product.reshape(a.shape[0], a.shape[1], b.shape[2])


def _bmm_out(a: Tensor, b: Tensor, *, out: Tensor) -> Any:
    if not _is_dense(out) or out.dtype != a.dtype:
        return NotImplemented
    return _assign(out, _bmm(a, b))


_KERNELS: dict[str, dict[str, Callable[..., Any]]] = {
    "SparsePrivateUse1": {
        "_coalesce": _coalesce,
        "add.out": _add_out,
        "addmm": _addmm,
        "addmm.out": _addmm_out,
        "addmm_": _addmm_,
        "bmm": _bmm,
        "bmm.out": _bmm_out,
    },
    "SparseCsrPrivateUse1": {
        "mm": _matmul,
        "add.out": _add_out,
        "addmm.out": _addmm_out,
        "addmv.out": _addmv_out,
    },
}


def _or_host(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    base, _, overload = name.partition(".")

    def run(*args: Any, **kwargs: Any) -> Any:
        result = kernel(*args, **kwargs)
        if result is NotImplemented:
            return _C.run_sparse_on_host(f"aten::{base}", overload, args, kwargs)
        return result

    return run


def install() -> None:
    """Registers the kernels. Once per process."""
    for key, kernels in _KERNELS.items():
        for name, kernel in kernels.items():
            _aten.impl(name, _or_host(name, kernel), key)
