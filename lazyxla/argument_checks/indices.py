"""Indices and what they select."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lazyxla.argument_checks.tables import AFTER, BEFORE, Arguments, checks, dtype_name, require

_MAX = 2  # of embedding_bag's modes


def _check_indices_broadcast(indices: Sequence[Tensor | None]) -> None:
    shapes = [list(index.shape) for index in indices if index is not None]
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError:
        raise IndexError(
            "shape mismatch: indexing tensors could not be broadcast together with shapes "
            + ", ".join(map(str, shapes))
        ) from None


def _check_indexed(x: Tensor, indices: Sequence[Tensor | None], sizes: Sequence[int]) -> None:
    """Whether the indices fit the tensor, and values of these sizes what they select."""
    allowed = (torch.int64, torch.int32, torch.uint8, torch.bool)
    if any(index is not None and index.dtype not in allowed for index in indices):
        raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
    if len(indices) > x.dim():
        raise IndexError(f"too many indices for tensor of dimension {x.dim()} (got {len(indices)})")
    _check_indices_broadcast(indices)
    selecting = [None if index is None else _on_meta(index) for index in indices]
    selected = torch.ops.aten.index.Tensor(_on_meta(x), selecting)
    try:
        fits = torch.broadcast_shapes(sizes, selected.shape) == selected.shape
    except RuntimeError:
        fits = False
    require(
        fits,
        f"shape mismatch: value tensor of shape {list(sizes)} cannot be broadcast to indexing "
        f"result of shape {list(selected.shape)}",
    )


def _on_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


@checks(BEFORE, "index_put", "_index_put_impl", "_unsafe_index_put")
def _index_put(a: Arguments) -> None:
    x, values = a["self"], a["values"]
    _check_indexed(x, a["indices"], values.shape)
    require(
        x.dtype == values.dtype,
        "Index put requires the source and destination dtypes match, got "
        f"{dtype_name(x.dtype)} for the destination and {dtype_name(values.dtype)} for the "
        "source.",
    )


@checks(BEFORE, "_unsafe_masked_index_put_accumulate")
def _masked_index_put(a: Arguments) -> None:
    if a["self"].numel() > 0:
        sizes = torch.broadcast_shapes(a["values"].shape, a["mask"].shape)
        _check_indexed(a["self"], a["indices"], sizes)


@checks(BEFORE, "put")
def _put(a: Arguments) -> None:
    x, index, source = a["self"], a["index"], a["source"]
    if source.numel() != index.numel():
        raise IndexError(
            "put_(): Expected source and index to have the same number of elements, but got "
            f"source.numel() = {source.numel()}, index.numel() = {index.numel()}"
        )
    require(
        index.dtype is torch.int64,
        f"put_(): Expected a long tensor for index, but got {dtype_name(index.dtype)}",
    )
    require(
        x.dtype == source.dtype,
        "put_(): self and source expected to have the same dtype, but got self.dtype = "
        f"{dtype_name(x.dtype)} and source.dtype = {dtype_name(source.dtype)}",
    )
    if source.numel() > 0 and x.numel() == 0:
        raise IndexError("put_(): Tried to put elements into an empty tensor")


@checks(AFTER, "index_reduce")
def _index_reduce(a: Arguments, _: Sequence[int]) -> None:
    x, index, source = a["self"], a["index"], a["source"]
    if index.dim() > 1:
        raise IndexError(
            f"index_reduce_(): Index is supposed to be a vector, but got dim: {index.dim()} with "
            f"type: {dtype_name(index.dtype)} and size: {list(index.shape)}"
        )
    dims = max(x.dim(), 1)
    if not -dims <= a["dim"] < dims:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-dims}, {dims - 1}], but got "
            f"{a['dim']})"
        )
    dim = a["dim"] % dims
    require(
        dim < max(source.dim(), 1),
        f"index_reduce_(): Indexing dim {dim} is out of bounds of the source tensor with dim "
        f"{source.dim()}",
    )
    if source.dim() == 0 and index.numel() != 1:
        raise IndexError(f"Dimension specified as {dim} but tensor has no dimensions")
    size = source.size(dim) if source.dim() else 1
    require(
        index.numel() == size,
        f"index_reduce_(): Number of indices ({index.numel()}) should be equal to "
        f"source.size(dim): ({size}), for dim: {dim}",
    )
    others = [list(each.shape[:dim] + each.shape[dim + 1 :]) for each in (x, source)]
    require(
        others[0] == others[1] and min(x.dim(), 1) == min(source.dim(), 1),
        "source tensor shape must match self tensor shape, excluding the specified dimension. "
        f"Got self.shape = {list(x.shape)} source.shape = {list(source.shape)}",
    )


@checks(BEFORE, "_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(a: Arguments) -> None:
    offsets, indices = a["offsets"], a["indices"]
    # The rule would take all indices of more dimensions, bag by bag.
    require(
        indices.dim() in (1, 2),
        f"input has to be a 1D or 2D Tensor, but got Tensor of dimension {indices.dim()}",
    )
    for name, rank in (("offsets", 1), ("weight", 2)):
        require(
            a[name].dim() == rank,
            f"{name} has to be a {rank}D Tensor, but got Tensor of dimension {a[name].dim()}",
        )
    # PyTorch's kernel would read beyond the end of the offsets.
    belong = offsets.numel() > 0 or indices.numel() == 0
    require(
        belong or (a["mode"] != _MAX and a["per_sample_weights"] is None),
        "embedding_bag: mode='max' or per_sample_weights for indices that belong to no bag: "
        "there are no offsets",
    )


@checks(BEFORE, "searchsorted.Tensor", "searchsorted.Scalar")
def _searchsorted(a: Arguments) -> None:
    side = a["side"]
    require(
        side in (None, "left", "right"),
        f"torch.searchsorted(): side can only be 'left' or 'right' but got {side}",
    )
    require(
        a["sorted_sequence"].dim() > 0,
        "torch.searchsorted(): boundaries tensor should have positive dimension, but got 0 "
        "dimension",
    )
