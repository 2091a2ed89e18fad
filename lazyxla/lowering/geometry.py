"""Reading and writing a storage through a geometry (sizes, strides, offset) without indices.

A base lies in memory as a dense permutation of its dimensions. Ordered by stride, these dimensions
are the digits of a mixed-radix number: an element's address is the sum of digit times weight. Each
dimension of a view steps along one digit, as long as its stride is a multiple of that digit's
weight and it never carries into the next digit; where it does, neighbouring digits are merged until
it holds (in the end all are one digit, the flat memory). Every digit is then a one-dimensional
problem of its own, with a start that the offset gives:

    no view dimension       select one index
    one view dimension      slice with a step
    several, nested         cut into blocks of the largest stride, reshape, go on inside a block
    several, overlapping    gather over computed indices (`Take`), the only case that needs them

A reshape, a transpose and a broadcast bring the result into the view's order. For example a base of
shape [B, S, 3*H*D] and the view that attention takes of its keys, [B, H, D, S]: the last digit is
cut into [3, H, D], index 1 of the first of them is selected, and one transpose follows.

A plan is a tuple of steps. Each step can be read through (`read`) and written through (`write`),
the write being the mirror image: a slice becomes an update of that slice, a transpose its inverse,
and so on.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lazyxla.lowering.program import Geometry
from lazyxla.lowering.units import common_unit, from_unit, in_units, to_unit

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

Value = Any
Source = Callable[[], Value]
"""Makes the value that a step reads; called only where a write leaves some of it in place."""


class Reshape(NamedTuple):
    before: tuple[int, ...]
    after: tuple[int, ...]

    def read(self, b: "Builder", x: Value) -> Value:
        return b.reshape(x, self.after)

    def write(self, b: "Builder", _: Source, update: Value) -> Value:
        return b.reshape(update, self.before)


class Transpose(NamedTuple):
    permutation: tuple[int, ...]

    def read(self, b: "Builder", x: Value) -> Value:
        return b.transpose(x, self.permutation)

    def write(self, b: "Builder", _: Source, update: Value) -> Value:
        inverse = sorted(range(len(self.permutation)), key=self.permutation.__getitem__)
        return b.transpose(update, inverse)


class Broadcast(NamedTuple):
    """Places dimension i of the operand at dims[i] of `sizes` and repeats it along the others."""

    dims: tuple[int, ...]
    sizes: tuple[int, ...]

    def read(self, b: "Builder", x: Value) -> Value:
        return b.hlo.broadcast_in_dim(b.type(b.dtype(x), self.sizes), x, self.dims)

    def write(self, b: "Builder", _: Source, update: Value) -> Value:
        # Several elements share one place; which of them stays is not defined in PyTorch either.
        limits = [n if i in self.dims else 1 for i, n in enumerate(self.sizes)]
        first = b.slice(update, [0] * len(limits), limits)
        return b.reshape(first, [self.sizes[i] for i in self.dims])


class Slice(NamedTuple):
    starts: tuple[int, ...]
    limits: tuple[int, ...]
    strides: tuple[int, ...]

    def read(self, b: "Builder", x: Value) -> Value:
        return b.slice(x, self.starts, self.limits, self.strides)

    def write(self, b: "Builder", source: Source, update: Value) -> Value:
        x = source()
        if all(s == 1 for s in self.strides):
            return b.dynamic_update_slice(x, update, self.starts)
        return self._interleave(b, x, update)

    def _interleave(self, b: "Builder", x: Value, update: Value) -> Value:
        """Spreads the update by interior padding and selects it where the slice lies."""
        shape, sizes = b.shape(x), b.shape(update)
        ends = [s + (n - 1) * t for s, n, t in zip(self.starts, sizes, self.strides, strict=True)]
        high = [n - 1 - e for n, e in zip(shape, ends, strict=True)]
        spread = b.pad(update, self.starts, high, [t - 1 for t in self.strides])
        mask = None
        for dim, (start, end, stride) in enumerate(
            zip(self.starts, ends, self.strides, strict=True)
        ):
            if stride == 1 and end - start + 1 == shape[dim]:
                continue
            inside = self._places(b, shape[dim], start, end, stride)
            inside = b.hlo.broadcast_in_dim(b.type(torch.bool, shape), inside, [dim])
            mask = inside if mask is None else b.hlo.and_(mask, inside)
        return b.select(mask, spread, x)

    def _places(self, b: "Builder", size: int, start: int, end: int, stride: int) -> Value:
        """Which of 0..size-1 the slice addresses, as a bool vector."""
        i = b.iota([size], 0, torch.int32)
        mask = b.compare(i, b.full_like(i, end), "LE")
        mask = b.hlo.and_(mask, b.compare(i, b.full_like(i, start), "GE"))
        if stride > 1:
            rest = b.hlo.remainder(b.hlo.subtract(i, b.full_like(i, start)), b.full_like(i, stride))
            mask = b.hlo.and_(mask, b.compare(rest, b.full_like(i, 0), "EQ"))
        return mask


class Pad(NamedTuple):
    """Completes the last block of a digit; what is added is never read."""

    high: tuple[int, ...]

    def read(self, b: "Builder", x: Value) -> Value:
        return b.pad(x, [0] * len(self.high), self.high)

    def write(self, b: "Builder", _: Source, update: Value) -> Value:
        limits = [n - h for n, h in zip(b.shape(update), self.high, strict=True)]
        return b.slice(update, [0] * len(limits), limits)


class Take(NamedTuple):
    """Replaces dimension `dim` by the dimensions `sizes`, read at start + sum of index * stride."""

    dim: int
    start: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def _index(self, b: "Builder") -> Value:
        last = self.start + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))
        dtype = torch.int32 if last < 2**31 else torch.int64
        index = b.constant(self.start, dtype, self.sizes)
        for i, stride in enumerate(self.strides):
            step = b.iota(self.sizes, i, dtype)
            index = b.hlo.add(index, b.scale(step, stride))
        return index

    def read(self, b: "Builder", x: Value) -> Value:
        return b.take(x, self._index(b), self.dim)

    def write(self, b: "Builder", source: Source, update: Value) -> Value:
        # scatter_nd wants the indexed dimensions first.
        rank, count = b.rank(update), len(self.sizes)
        moved = range(self.dim, self.dim + count)
        order = [*moved, *(i for i in range(rank) if i not in moved)]
        index = b.unsqueeze(self._index(b), -1)
        return b.scatter_nd(source(), index, b.transpose(update, order), [self.dim])


class Empty(NamedTuple):
    """A view without elements."""

    sizes: tuple[int, ...]

    def read(self, b: "Builder", x: Value) -> Value:
        return b.zeros(self.sizes, b.dtype(x))

    def write(self, b: "Builder", source: Source, _: Value) -> Value:
        raise AssertionError("the planner makes no write to nothing")


Step = Reshape | Transpose | Broadcast | Slice | Pad | Take | Empty


class _Digit(NamedTuple):
    weight: int
    radix: int
    members: tuple[int, ...]
    """The base dimensions that form the digit, outermost first."""


class _Axis(NamedTuple):
    """A dimension on the way from base to view."""

    size: int
    start: int
    dims: tuple[tuple[int, int, int], ...]
    """The view dimensions still to be carved out of it: (stride, size, number)."""


@functools.lru_cache(maxsize=4096)
def plan(base: Geometry, view: Geometry) -> tuple[Step, ...]:
    """The steps from a value of shape `base.sizes` to one of shape `view.sizes`.

    Both geometries have one dtype; `base` must be dense with offset 0. Raises ValueError if the
    view reaches beyond the base.
    """
    if 0 in view.sizes:
        return (Empty(view.sizes),)
    permutation = _as_permutation(base, view)
    if permutation is not None:
        return () if permutation == tuple(range(len(permutation))) else (Transpose(permutation),)
    live = [
        (stride, size, number)
        for number, (size, stride) in enumerate(zip(view.sizes, view.strides, strict=True))
        if size > 1 and stride > 0
    ]
    digits = _digits(base, live, view.offset)
    steps: list[Step] = []
    shape = base.sizes
    wide = [i for i, n in enumerate(base.sizes) if n > 1]
    if not all(_adjacent(digit.members, wide) for digit in digits):
        order = sorted(range(len(shape)), key=lambda i: -base.strides[i] if shape[i] > 1 else -1e30)
        steps.append(Transpose(tuple(order)))
        shape = tuple(shape[i] for i in order)
    else:
        digits.sort(key=lambda digit: digit.members[0])
    axes = [
        _Axis(
            digit.radix,
            view.offset // digit.weight % digit.radix,
            tuple((s // digit.weight, n, v) for s, n, v in live if _belongs(s, digit)),
        )
        for digit in digits
    ]
    steps.append(Reshape(shape, tuple(axis.size for axis in axes)))
    order = _carve(axes, steps)
    _arrange(order, view, steps)
    return tuple(_tidy(steps))


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


def _digits(base: Geometry, live: Sequence[tuple[int, int, int]], offset: int) -> list[_Digit]:
    """The base's dimensions by decreasing stride, merged until no view dimension carries."""
    digits = [
        _Digit(stride, size, (i,))
        for i, (size, stride) in enumerate(zip(base.sizes, base.strides, strict=True))
        if size > 1
    ]
    digits.sort(key=lambda digit: -digit.weight)
    total = math.prod(base.sizes)
    if offset + sum((n - 1) * s for s, n, _ in live) >= total:
        raise ValueError(f"a view reaches beyond its storage of {total} elements")
    while (i := _conflict(digits, live, offset)) is not None:
        outer, inner = digits[i : i + 2]
        digits[i : i + 2] = [
            _Digit(inner.weight, outer.radix * inner.radix, outer.members + inner.members)
        ]
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


def _adjacent(members: tuple[int, ...], wide: list[int]) -> bool:
    """Whether the dimensions follow one another in the base, size-1 dimensions aside."""
    first = wide.index(members[0])
    return tuple(wide[first : first + len(members)]) == members


class _Cut(NamedTuple):
    """How an axis is sliced, padded at its end, and which view dimensions and axes it becomes."""

    start: int
    limit: int
    stride: int
    high: int
    parts: tuple["int | _Axis", ...]
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
    if not _nested(dims):
        return _Cut(0, axis.size, 1, 0, tuple(v for _, _, v in axis.dims), take=True)
    inside = axis.start % stride
    if inside + sum((n - 1) * s for s, n, _ in dims[1:]) >= stride:
        inside = 0
    first = axis.start - inside
    limit = first + size * stride
    rest = _Axis(stride, inside, tuple(dims[1:]))
    return _Cut(first, min(limit, axis.size), 1, max(0, limit - axis.size), (number, rest))


def _nested(dims: Sequence[tuple[int, int, int]]) -> bool:
    """Whether every dimension strides over all that the smaller ones address."""
    reach = 0
    for stride, size, _ in reversed(dims):
        if stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def _arrange(order: list[int], view: Geometry, steps: list[Step]) -> None:
    """Appends reshape, transpose and broadcast from dimensions in `order` to the view's shape."""
    repeated = {
        i for i, (n, s) in enumerate(zip(view.sizes, view.strides, strict=True)) if n > 1 and s == 0
    }
    kept = [i for i in range(len(view.sizes)) if i not in repeated]
    # Dimensions of size 1 are put in before the transpose, each behind its predecessor in the view,
    # so that the transpose comes last, where a matrix product can absorb it.
    before = list(order)
    for place, i in enumerate(kept):
        if view.sizes[i] == 1:
            at = before.index(kept[place - 1]) + 1 if place else 0
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


# ---- reading and writing, also as another dtype ----


def read(b: "Builder", x: Value, base: Geometry, view: Geometry) -> Value:
    """The value that `view` shows of the storage whose content is `x`, lying by `base`."""
    if base.dtype == view.dtype:
        return _read(b, x, plan(base, view))
    unit = common_unit(base, view)
    x = to_unit(b, x, unit)
    return from_unit(b, _read(b, x, plan(in_units(base, unit), in_units(view, unit))), view.dtype)


def write(b: "Builder", x: Value, update: Value, base: Geometry, view: Geometry) -> Value:
    """`x` with the elements that `view` addresses replaced by `update`."""
    if 0 in view.sizes:
        return x
    if base.dtype == view.dtype:
        return _write(b, lambda: x, update, plan(base, view))
    unit = common_unit(base, view)
    steps = plan(in_units(base, unit), in_units(view, unit))
    source = functools.cache(lambda: to_unit(b, x, unit))
    return from_unit(b, _write(b, source, to_unit(b, update, unit), steps), base.dtype)


def _read(b: "Builder", x: Value, steps: tuple[Step, ...]) -> Value:
    for step in steps:
        x = step.read(b, x)
    return x


def _write(b: "Builder", source: Source, update: Value, steps: tuple[Step, ...]) -> Value:
    if not steps:
        return update
    step = steps[0]
    inner = _write(b, functools.cache(lambda: step.read(b, source())), update, steps[1:])
    return step.write(b, source, inner)
