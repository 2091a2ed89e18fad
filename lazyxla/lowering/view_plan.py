"""How a view of a storage, by its geometry (sizes, strides, offset), is read and written without
indices.

A base is laid out in memory as a dense permutation of its dimensions. Ordered by stride, these
dimensions are the digits of a mixed-radix number: an element's address is the sum of digit times
weight. Each dimension of a view steps along one digit, as long as its stride is a multiple of that
digit's weight and it never carries into the next digit; where it does, neighbouring digits are
merged until it holds (in the end all are one digit, the flat memory). Every digit is then a
one-dimensional problem of its own, with a start that the offset gives:

    no view dimension       select one index
    one view dimension      slice with a step
    several, nested         cut into blocks of the largest stride, reshape, continue inside a block
    several, overlapping    gather over computed indices (`Take`), the only case that needs them;
                            on some platforms windows are slices that are concatenated

A reshape, a transpose and a broadcast bring the result into the view's order. For example a base of
shape [B, S, 3*H*D] and the view that attention takes of its keys, [B, H, D, S]: the last digit is
cut into [3, H, D], index 1 of the first of them is selected, and one transpose follows.

A plan is a tuple of steps (view_steps.py).

Where a view begins may be known only when the program runs. Its starts in the digits are then
values, and the elements between its first and its last one are cut out of each such digit before
anything else, by one dynamic slice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from lazyxla.lowering.program import Geometry
from lazyxla.lowering.view_steps import (
    Broadcast,
    Empty,
    Pad,
    Reshape,
    Slice,
    Step,
    Take,
    Transpose,
    Window,
)


class _Digit(NamedTuple):
    weight: int
    radix: int
    members: tuple[int, ...]
    """The base dimensions that form the digit, outermost first."""


class _Axis(NamedTuple):
    """A dimension in the steps from base to view."""

    size: int
    start: int
    dims: tuple[tuple[int, int, int], ...]
    """The view dimensions still to be carved out of it: (stride, size, number)."""


@functools.lru_cache(maxsize=4096)
def plan(
    base: Geometry,
    view: Geometry,
    weights: tuple[int, ...] = (),
    starts: tuple[int | None, ...] = (),
) -> tuple[Step, ...]:
    """The steps from a value of shape `base.sizes` to one of shape `view.sizes`.

    Both geometries have one dtype; `base` must be dense with offset 0. With `weights`, those of the
    digits, the view begins where `starts` say instead of at its offset: a number for each digit of
    which it leaves some out (outermost first), or None where it is known only when the program
    runs. Raises ValueError if the view reaches beyond the base.
    """
    if 0 in view.sizes:
        return (Empty(view.sizes),)
    permutation = None if starts else _as_permutation(base, view)
    if permutation is not None:
        return () if permutation == tuple(range(len(permutation))) else (Transpose(permutation),)
    live = [
        (stride, size, number)
        for number, (size, stride) in enumerate(zip(view.sizes, view.strides, strict=True))
        if size > 1 and stride > 0
    ]
    digits = _merged(base, weights) if weights else _digits(base, live, view.offset)
    begins = _begins(digits, live, starts) if starts else _split(digits, view.offset)
    steps: list[Step] = []
    shape = base.sizes
    longer = [i for i, n in enumerate(base.sizes) if n > 1]
    if not all(_adjacent(digit.members, longer) for digit in digits):
        order = sorted(range(len(shape)), key=lambda i: -base.strides[i] if shape[i] > 1 else -1e30)
        steps.append(Transpose(tuple(order)))
        shape = tuple(shape[i] for i in order)
    else:
        digits.sort(key=lambda digit: digit.members[0])
    steps.append(Reshape(shape, tuple(digit.radix for digit in digits)))
    numbers: list[int | None] = []
    axes = []
    for digit in digits:
        start, number = begins[digit.weight]
        numbers.append(number)
        dims = tuple((s // digit.weight, n, v) for s, n, v in live if _belongs(s, digit))
        size = digit.radix if number is None else _reach(digit, live) + 1
        axes.append(_Axis(size, start, dims))
    if any(number is not None for number in numbers):
        steps.append(Window(tuple(numbers), tuple(axis.size for axis in axes)))
    order = _carve(axes, steps)
    _arrange(order, view, steps)
    return tuple(_tidy(steps))


def _split(digits: Sequence[_Digit], offset: int) -> dict[int, tuple[int, None]]:
    """Where a view begins in each digit, by the digit's weight."""
    return {digit.weight: (offset // digit.weight % digit.radix, None) for digit in digits}


def _begins(
    digits: Sequence[_Digit],
    live: Sequence[tuple[int, int, int]],
    starts: Sequence[int | None],
) -> dict[int, tuple[int, int | None]]:
    """The same if starts are given, and which of them it is where it is not known now."""
    begins: dict[int, tuple[int, int | None]] = {}
    left = iter(enumerate(starts))
    for digit in digits:
        number, start = (None, 0) if _reach(digit, live) == digit.radix - 1 else next(left)
        begins[digit.weight] = (start, None) if start is not None else (0, number)
    return begins


def _reach(digit: _Digit, live: Sequence[tuple[int, int, int]]) -> int:
    """The distance from a view's first element to its last one, in the digit."""
    return sum((n - 1) * (s // digit.weight) for s, n, _ in live if _belongs(s, digit))


def _as_permutation(base: Geometry, view: Geometry) -> tuple[int, ...] | None:
    if view.offset or len(base.sizes) != len(view.sizes):
        return None
    free = list(range(len(base.sizes)))
    found = []
    for i, (size, stride) in enumerate(zip(view.sizes, view.strides, strict=True)):
        matches = [
            d for d in free if base.sizes[d] == size and (base.strides[d] == stride or size == 1)
        ]
        if not matches:
            return None
        exact = [d for d in matches if base.strides[d] == stride] or matches
        best = i if i in exact else exact[0]
        free.remove(best)
        found.append(best)
    return tuple(found)


def _belongs(stride: int, digit: _Digit) -> bool:
    return digit.weight <= stride < digit.weight * digit.radix


def _of_dimensions(base: Geometry) -> list[_Digit]:
    """The base's dimensions by decreasing stride."""
    digits = [
        _Digit(stride, size, (i,))
        for i, (size, stride) in enumerate(zip(base.sizes, base.strides, strict=True))
        if size > 1
    ]
    return sorted(digits, key=lambda digit: -digit.weight)


def _merged(base: Geometry, weights: Sequence[int]) -> list[_Digit]:
    """The base's dimensions, merged to digits of these weights."""
    digits: list[_Digit] = []
    outer: _Digit | None = None
    for digit in _of_dimensions(base):
        outer = _merge(outer, digit) if outer else digit
        if digit.weight in weights:
            digits.append(outer)
            outer = None
    return digits


def _merge(outer: _Digit, inner: _Digit) -> _Digit:
    return _Digit(inner.weight, outer.radix * inner.radix, outer.members + inner.members)


def _digits(base: Geometry, live: Sequence[tuple[int, int, int]], offset: int) -> list[_Digit]:
    """The base's dimensions, merged until no view dimension carries."""
    digits = _of_dimensions(base)
    total = math.prod(base.sizes)
    if offset + sum((n - 1) * s for s, n, _ in live) >= total:
        raise ValueError(f"a view reaches beyond its storage of {total} elements")
    while (i := _conflict(digits, live, offset)) is not None:
        digits[i : i + 2] = [_merge(*digits[i : i + 2])]
    return digits


def _conflict(
    digits: Sequence[_Digit], live: Sequence[tuple[int, int, int]], offset: int
) -> int | None:
    """The number of the first digit that must be merged with the next one, if any."""
    for i, digit in enumerate(digits):
        mine = [(s, n) for s, n, _ in live if _belongs(s, digit)]
        if any(s % digit.weight for s, _ in mine):
            return i
        last = offset // digit.weight % digit.radix
        last += sum((n - 1) * (s // digit.weight) for s, n in mine)
        if last >= digit.radix:
            return i - 1
    return None


def _adjacent(members: tuple[int, ...], longer: list[int]) -> bool:
    """Whether the dimensions follow one another in the base, size-1 dimensions aside."""
    first = longer.index(members[0])
    return tuple(longer[first : first + len(members)]) == members


class _Cut(NamedTuple):
    """How an axis is sliced, padded at its end, and which view dimensions and axes it becomes."""

    start: int
    limit: int
    stride: int
    high: int
    parts: tuple[int | _Axis, ...]
    take: bool = False


def _carve(axes: list[_Axis], steps: list[Step]) -> list[int]:
    """Appends the steps that carve the view dimensions out of `axes`; returns their order."""
    sizes = {v: n for axis in axes for _, n, v in axis.dims}
    parts: list[Any] = list(axes)
    while any(isinstance(part, _Axis) for part in parts):
        cuts = [
            _cut(part) if isinstance(part, _Axis) else _Cut(0, sizes[part], 1, 0, (part,))
            for part in parts
        ]
        steps.append(
            Slice(
                tuple(cut.start for cut in cuts),
                tuple(cut.limit for cut in cuts),
                tuple(cut.stride for cut in cuts),
            )
        )
        steps.append(Pad(tuple(cut.high for cut in cuts)))
        shape = [-(-(cut.limit - cut.start) // cut.stride) + cut.high for cut in cuts]
        for dim in reversed([dim for dim, cut in enumerate(cuts) if cut.take]):
            strides, counts, _ = zip(*parts[dim].dims, strict=True)
            steps.append(Take(dim, parts[dim].start, counts, strides))
            shape[dim : dim + 1] = counts
        parts = [part for cut in cuts for part in cut.parts]
        after = tuple(p.size if isinstance(p, _Axis) else sizes[p] for p in parts)
        steps.append(Reshape(tuple(shape), after))
    return parts


def _cut(axis: _Axis) -> _Cut:
    dims = sorted(axis.dims, reverse=True)
    if not dims:
        return _Cut(axis.start, axis.start + 1, 1, 0, ())
    stride, size, number = dims[0]
    if len(dims) == 1:
        return _Cut(axis.start, axis.start + (size - 1) * stride + 1, stride, 0, (number,))
    if stride <= sum((n - 1) * s for s, n, _ in dims[1:]):
        return _Cut(0, axis.size, 1, 0, tuple(v for _, _, v in axis.dims), take=True)
    inside = axis.start % stride
    if inside + sum((n - 1) * s for s, n, _ in dims[1:]) >= stride:
        inside = 0
    first = axis.start - inside
    limit = first + size * stride
    rest = _Axis(stride, inside, tuple(dims[1:]))
    return _Cut(first, min(limit, axis.size), 1, max(0, limit - axis.size), (number, rest))


def _arrange(order: list[int], view: Geometry, steps: list[Step]) -> None:
    """Appends reshape, transpose and broadcast from dimensions in `order` to the view's shape."""
    repeated = {
        i for i, (n, s) in enumerate(zip(view.sizes, view.strides, strict=True)) if n > 1 and s == 0
    }
    kept = [i for i in range(len(view.sizes)) if i not in repeated]
    # Dimensions of size 1 are put in before the transpose, each behind its predecessor in the view,
    # so that the transpose is last, where a matmul can absorb it.
    before = list(order)
    for k, i in enumerate(kept):
        if view.sizes[i] == 1:
            at = before.index(kept[k - 1]) + 1 if k else 0
            before.insert(at, i)
    shape = tuple(view.sizes[i] for i in before)
    steps.append(Reshape(tuple(view.sizes[i] for i in order), shape))
    steps.append(Transpose(tuple(before.index(i) for i in kept)))
    if repeated:
        steps.append(Broadcast(tuple(kept), view.sizes))


def _tidy(steps: list[Step]) -> list[Step]:
    """Drops steps that do nothing and joins neighbouring reshapes."""
    result: list[Step] = []
    shape: tuple[int, ...] = ()
    for step in steps:
        if isinstance(step, Reshape):
            last = result[-1] if result else None
            if isinstance(last, Reshape):
                result.pop()
                step = Reshape(last.before, step.after)
            shape = step.after
            if step.before == step.after:
                continue
        elif isinstance(step, Window):
            shape = step.sizes
        elif isinstance(step, Slice):
            if not any(step.starts) and step.limits == shape and set(step.strides) <= {1}:
                continue
        elif isinstance(step, Pad):
            if not any(step.high):
                continue
        elif isinstance(step, Transpose) and list(step.permutation) == sorted(step.permutation):
            continue
        result.append(step)
    return result
