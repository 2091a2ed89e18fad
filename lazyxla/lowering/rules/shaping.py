"""Joining, repeating, turning and padding tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


# ---- joining ----


@rule("aten::cat")
def cat(b: Builder, xs: list[Value], dim: int) -> Value:
    # Empty 1-D tensors join with anything, a rule older than zero-size dimensions.
    kept = [x for x in xs if b.shape(x) != (0,)] or xs[:1]
    return b.concat([b.value(x, b.outputs[0].dtype) for x in kept], dim)


@rule("aten::stack", "aten::_stack")
def stack(b: Builder, xs: list[Value], dim: int) -> Value:
    return b.stack([b.value(x, b.outputs[0].dtype) for x in xs], dim)


@rule("aten::block_diag")
def block_diag(b: Builder, xs: list[Value]) -> Value:
    dtype, (rows, columns) = b.outputs[0]
    result, row, column = b.zeros((rows, columns), dtype), 0, 0
    for x in xs:
        x = b.value(x, dtype)
        x = b.reshape(x, (1,) * (2 - b.rank(x)) + b.shape(x))
        height, width = b.shape(x)
        result = b.dynamic_update_slice(result, x, [row, column])
        row, column = row + height, column + width
    return result


# ---- repeating and turning ----


@rule("aten::repeat")
def repeat(b: Builder, x: Value, repeats: list[int]) -> Value:
    shape = (1,) * (len(repeats) - b.rank(x)) + b.shape(x)
    # Each dimension becomes (repeats, size), of which the first is broadcast.
    apart = [n for size in shape for n in (1, size)]
    wide = [n for size, times in zip(shape, repeats, strict=True) for n in (times, size)]
    return b.reshape(b.broadcast_to(b.reshape(x, apart), wide), b.outputs[0].shape)


@rule("aten::flip")
def flip(b: Builder, x: Value, dims: list[int]) -> Value:
    return b.flip(x, dims) if b.rank(x) else x


def _roll(b: Builder, x: Value, shift: Value, dim: int) -> Value:
    size = b.shape(x)[dim]
    if not size:
        return x
    if (places := b.known(shift)) is None:
        return _roll_by_value(b, x, b.value(shift, torch.int64), dim)
    if not (places := int(places.real) % size):
        return x
    last = b.slice_dim(x, dim, size - places, size)
    return b.concat([last, b.slice_dim(x, dim, 0, size - places)], dim)


def _roll_by_value(b: Builder, x: Value, shift: Value, dim: int) -> Value:
    """A window of two copies side by side."""
    shape = b.shape(x)
    size = b.full_like(shift, shape[dim])
    rest = b.hlo.remainder(b.hlo.negate(shift), size)  # of the sign of the first
    start = b.hlo.remainder(b.hlo.add(rest, size), size)
    starts = [b.convert(start, torch.int32) if i == dim else 0 for i in range(len(shape))]
    return b.dynamic_slice(b.concat([x, x], dim), starts, shape)


@rule("aten::roll")
def roll(b: Builder, x: Value, shifts: list[Value], dims: list[int]) -> Value:
    if not dims:
        return b.reshape(_roll(b, b.reshape(x, (-1,)), shifts[0], 0), b.shape(x))
    if not b.rank(x):
        return x
    for shift, dim in zip(shifts, dims, strict=True):
        x = _roll(b, x, shift, dim % b.rank(x))
    return x


@rule("aten::rot90")
def rot90(b: Builder, x: Value, k: int, dims: list[int]) -> Value:
    first, second = dims
    if k % 4 == 2:
        return b.flip(x, dims)
    if k % 4 == 1:
        return b.swap(b.flip(x, [second]), first, second)
    return b.flip(b.swap(x, first, second), [second]) if k % 4 else x


@rule("aten::pixel_shuffle")
def pixel_shuffle(b: Builder, x: Value, factor: int) -> Value:
    *batch, channels, height, width = b.shape(x)
    n = len(batch)
    x = b.reshape(x, (*batch, channels // factor**2, factor, factor, height, width))
    x = b.transpose(x, [*range(n), n, n + 3, n + 1, n + 4, n + 2])
    return b.reshape(x, b.outputs[0].shape)


@rule("aten::pixel_unshuffle")
def pixel_unshuffle(b: Builder, x: Value, factor: int) -> Value:
    *batch, channels, height, width = b.shape(x)
    n = len(batch)
    x = b.reshape(x, (*batch, channels, height // factor, factor, width // factor, factor))
    x = b.transpose(x, [*range(n), n, n + 2, n + 4, n + 1, n + 3])
    return b.reshape(x, b.outputs[0].shape)


@rule("aten::channel_shuffle")
def channel_shuffle(b: Builder, x: Value, groups: int) -> Value:
    batch, channels, *space = b.shape(x)
    apart = b.reshape(x, (batch, groups, channels // groups, *space))
    return b.reshape(b.swap(apart, 1, 2), b.shape(x))


@rule("aten::repeat_interleave.Tensor")
def repeat_interleave(b: Builder, repeats: Value, output_size: int | None) -> Value:
    """Index i repeats[i] times; without an output size the operator does not get here."""
    return b.call_jax(_repeated, repeats, length=b.outputs[0].shape[0])


def _repeated(repeats: Any, *, length: int) -> Any:
    import jax.numpy as jnp

    index = jnp.arange(repeats.shape[0], dtype=repeats.dtype)
    return jnp.repeat(index, repeats, total_repeat_length=length)


# ---- padding ----


def _amounts(rank: int, padding: list[int]) -> list[tuple[int, int]]:
    """(before, after) per dimension; PyTorch lists pairs from the last dimension on."""
    pairs = [(padding[i], padding[i + 1]) for i in range(0, len(padding), 2)]
    return [(0, 0)] * (rank - len(pairs)) + pairs[::-1]


@rule("aten::constant_pad_nd")
def constant_pad(b: Builder, x: Value, padding: list[int], value: Value) -> Value:
    amounts = _amounts(b.rank(x), padding)
    return b.pad(x, [low for low, _ in amounts], [high for _, high in amounts], value=value)


_REFLECTION = tuple(f"aten::reflection_pad{n}d" for n in (1, 2, 3))
_REPLICATION = tuple(f"aten::replication_pad{n}d" for n in (1, 2, 3))


def _crop(b: Builder, x: Value, dim: int, low: int, high: int) -> Value:
    """Negative amounts cut off."""
    return b.slice_dim(x, dim, max(-low, 0), b.shape(x)[dim] - max(-high, 0))


def _uncrop(b: Builder, grad: Value, dim: int, low: int, high: int) -> Value:
    lows, highs = [0] * b.rank(grad), [0] * b.rank(grad)
    lows[dim], highs[dim] = max(-low, 0), max(-high, 0)
    return b.pad(grad, lows, highs)


@rule(*_REFLECTION)
def reflection_pad(b: Builder, x: Value, padding: list[int]) -> Value:
    for dim, (low, high) in enumerate(_amounts(b.rank(x), padding)):
        size = b.shape(x)[dim]
        before = [b.flip(b.slice_dim(x, dim, 1, low + 1), [dim])] if low > 0 else []
        after = [b.flip(b.slice_dim(x, dim, size - 1 - high, size - 1), [dim])] if high > 0 else []
        x = b.concat([*before, _crop(b, x, dim, low, high), *after], dim)
    return x


@rule(*_REPLICATION)
def replication_pad(b: Builder, x: Value, padding: list[int]) -> Value:
    for dim, (low, high) in enumerate(_amounts(b.rank(x), padding)):
        size = b.shape(x)[dim]
        if size + min(low, 0) + min(high, 0) <= 0:  # more is cut off than there is
            places = [min(max(i - low, 0), size - 1) for i in range(size + low + high)]
            x = b.take(x, b.array(places, torch.int32), dim)
            continue
        before = [_repeat_edge(b, x, dim, 0, low)] if low > 0 else []
        after = [_repeat_edge(b, x, dim, size - 1, high)] if high > 0 else []
        x = b.concat([*before, _crop(b, x, dim, low, high), *after], dim)
    return x


def _repeat_edge(b: Builder, x: Value, dim: int, place: int, times: int) -> Value:
    shape = list(b.shape(x))
    shape[dim] = times
    return b.broadcast_to(b.slice_dim(x, dim, place, place + 1), shape)


def _add_at(b: Builder, x: Value, part: Value, dim: int, start: int) -> Value:
    """`x` with `part` added from `start` on along `dim`."""
    shape = b.shape(x)
    lows, highs = [0] * len(shape), [0] * len(shape)
    lows[dim], highs[dim] = start, shape[dim] - start - b.shape(part)[dim]
    return b.hlo.add(x, b.pad(part, lows, highs))


def _unpadded(b: Builder, grad: Value, dim: int, low: int, high: int) -> Value:
    """The gradient of the inside, and zeros for what a negative amount cut off."""
    size = b.shape(grad)[dim]
    inside = b.slice_dim(grad, dim, max(low, 0), size - max(high, 0))
    return _uncrop(b, inside, dim, low, high)


@rule(*(f"{name}_backward" for name in _REFLECTION))
def reflection_pad_backward(b: Builder, grad: Value, x: Value, padding: list[int]) -> Value:
    grad = b.convert(grad, b.compute_dtype(b.dtype(grad)))
    for dim, (low, high) in enumerate(_amounts(b.rank(x), padding)):
        total, inside = b.shape(grad)[dim], _unpadded(b, grad, dim, low, high)
        size = b.shape(inside)[dim]
        if low > 0:
            part = b.flip(b.slice_dim(grad, dim, 0, low), [dim])
            inside = _add_at(b, inside, part, dim, 1)
        if high > 0:
            part = b.flip(b.slice_dim(grad, dim, total - high, total), [dim])
            inside = _add_at(b, inside, part, dim, size - 1 - high)
        grad = inside
    return grad


@rule(*(f"{name}_backward" for name in _REPLICATION))
def replication_pad_backward(b: Builder, grad: Value, x: Value, padding: list[int]) -> Value:
    grad = b.convert(grad, b.compute_dtype(b.dtype(grad)))
    for dim, (low, high) in enumerate(_amounts(b.rank(x), padding)):
        total, inside = b.shape(grad)[dim], _unpadded(b, grad, dim, low, high)
        if low > 0:
            edge = b.reduce(b.slice_dim(grad, dim, 0, low), [dim], "sum", True)
            inside = _add_at(b, inside, edge, dim, 0)
        if high > 0:
            edge = b.reduce(b.slice_dim(grad, dim, total - high, total), [dim], "sum", True)
            inside = _add_at(b, inside, edge, dim, b.shape(inside)[dim] - 1)
        grad = inside
    return grad
