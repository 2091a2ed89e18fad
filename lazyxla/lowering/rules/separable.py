"""Linear maps along single dimensions: what resampling is made of.

Each element of the result is a weighted sum of a few elements along a dimension. Such a map is a
sparse matrix, given by `taps`: pairs of an index and a weight for each result element, which are
those of neighbours, in order, if there are many (more than `_MOST_TERMS`). A small one is applied
as a dense matmul, which accelerators do well; its adjoint is that with the transposed matrix. Of a
large one, whose matrix would outgrow what it maps, the elements are gathered.

A matmul spreads what is not finite, as 0 times infinity is none of the numbers. Gathering does not:
an element that has fewer taps than others has the index `NO_TAP` in place of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from lazyxla.lowering.functions import is_finite, total, where
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

Taps = list[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of int64 indices and weights, both of shape (out,)."""

NO_TAP = -1
"""The index of a tap that there is not; its weight is 0."""

_MOST_TERMS = 16
"""Taps up to which a matrix is a sum of terms."""


class Map(NamedTuple):
    """A linear map from `size` elements."""

    taps: Taps
    size: int


def apply(b: Builder, x: Value, maps: Sequence[Map], adjoint: bool = False) -> Value:
    """`x` with a map, or its adjoint, applied to each of its last dimensions, in order."""
    if not all(b.maps_by_matmul(size * len(taps[0][0]), adjoint) for taps, size in maps):
        return _by_gathering(b, x, maps, adjoint)
    matrices = [matrix(b, *each, x.dtype) for each in maps]
    if not b.gathers_what_is_not_finite:
        return b.apply_maps(x, matrices, adjoint)
    ends = [size if adjoint else len(taps[0][0]) for taps, size in maps]
    (result,) = b.cond(
        b.reduce(is_finite(x), range(x.rank), "and"),
        lambda: [b.apply_maps(x, matrices, adjoint)],
        lambda: [_by_gathering(b, x, maps, adjoint)],
        [(x.dtype, (*x.shape[: x.rank - len(maps)], *ends))],
    )
    return result


def _by_gathering(b: Builder, x: Value, maps: Sequence[Map], adjoint: bool) -> Value:
    for dim, (taps, size) in enumerate(maps, x.rank - len(maps)):
        indices, weights = (torch.stack(column, 1) for column in zip(*taps, strict=True))
        if adjoint:
            indices, weights = _inverted(indices, weights, size)
        x = _gathered(b, x, dim, indices, weights)
    return x


def _gathered(
    b: Builder, x: Value, dim: int, indices: torch.Tensor, weights: torch.Tensor
) -> Value:
    """The sums along a dimension that are given for each element of the result."""

    def part(index: torch.Tensor, weight: torch.Tensor) -> Value:
        def along(values: torch.Tensor, dtype: torch.dtype) -> Value:
            found = b.array(values.tolist(), dtype)
            return b.broadcast_to(found.reshape([*values.shape, *after]), taken.shape)

        after = [1] * (x.rank - 1 - dim)
        taken = b.take(x, b.array(index.clamp(min=0).tolist(), torch.int32), dim)
        if bool((index == NO_TAP).any()):
            taken = where(along(index != NO_TAP, torch.bool), taken, 0)
        return taken * along(weight, x.dtype)

    if indices.shape[1] > _MOST_TERMS:
        return part(indices, weights).sum([dim + 1])
    return total(part(*tap) for tap in zip(indices.unbind(1), weights.unbind(1), strict=True))


def _inverted(
    indices: torch.Tensor, weights: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each of `size` elements the results that it is part of, and its weights in them."""
    taps = (indices.reshape(-1) != NO_TAP).nonzero().flatten()
    source = indices.reshape(-1)[taps]
    order = source.argsort(stable=True)
    counts = source.bincount(minlength=size)
    column = torch.arange(len(source)) - (counts.cumsum(0) - counts)[source[order]]
    most = int(counts.max())
    results = torch.full((size, most), NO_TAP)
    shares = weights.new_zeros(size, most)
    results[source[order], column] = taps[order] // indices.shape[1]
    shares[source[order], column] = weights.reshape(-1)[taps[order]]
    return results, shares


def matrix(b: Builder, taps: Taps, size: int, dtype: torch.dtype) -> Value:
    """The map from `size` elements as a matrix (out, size)."""
    out = len(taps[0][0])
    if len(taps) > _MOST_TERMS:
        return _matrix_of_many(b, taps, size, dtype)
    column = b.iota([out, size], 1, torch.int32)

    def part(index: torch.Tensor, weight: torch.Tensor) -> Value:
        row = b.unsqueeze(b.array(index.tolist(), torch.int32), 1)
        return where(column == row, b.unsqueeze(b.array(weight.tolist(), dtype), 1), 0)

    return total(part(*tap) for tap in taps)


def _matrix_of_many(b: Builder, taps: Taps, size: int, dtype: torch.dtype) -> Value:
    """With one gather instead of a term for each tap."""
    indices, weights = (torch.stack(column, 1) for column in zip(*taps, strict=True))
    out, count = indices.shape
    start = b.unsqueeze(b.array(indices[:, 0].tolist(), torch.int32), 1)
    tap = b.iota([out, size], 1, torch.int32) - start
    own = (tap >= 0) & (tap < count)
    given = b.take_along(b.array(weights.tolist(), dtype), where(own, tap, 0), 1)
    return where(own, given, 0)
