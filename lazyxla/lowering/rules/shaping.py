"""Joining, repeating, turning and padding tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from jax import Array

    from lazyxla.lowering.builder import Builder


# ---- joining ----


@rule("aten::cat")
def cat(b: Builder, xs: list[Value], dim: int) -> Value:
    # Empty 1-D tensors join with anything, a rule older than zero-size dimensions.
    kept = [x for x in xs if x.shape != (0,)] or xs[:1]
    return b.concat([x.to(b.outputs[0].dtype) for x in kept], dim)


@rule("aten::stack", "aten::_stack")
def stack(b: Builder, xs: list[Value], dim: int) -> Value:
    return b.stack([x.to(b.outputs[0].dtype) for x in xs], dim)


# ---- repeating and turning ----


@rule("aten::repeat")
def repeat(b: Builder, x: Value, repeats: list[int]) -> Value:
    shape = (1,) * (len(repeats) - x.rank) + x.shape
    # Each dimension becomes (repeats, size), of which the first is broadcast.
    apart = [n for size in shape for n in (1, size)]
    repeated = [n for size, times in zip(shape, repeats, strict=True) for n in (times, size)]
    return b.broadcast_to(x.reshape(apart), repeated).reshape(b.outputs[0].shape)


@rule("aten::flip")
def flip(b: Builder, x: Value, dims: list[int]) -> Value:
    return b.flip(x, dims) if x.rank else x


def _roll(b: Builder, x: Value, shift: Operand, dim: int) -> Value:
    size = x.shape[dim]
    if (known := b.known(shift)) is None:
        return _roll_by_value(x, b.value(shift, torch.int64), dim)
    if not (count := int(known.real) % size):
        return x
    last = b.slice_dim(x, dim, size - count, size)
    return b.concat([last, b.slice_dim(x, dim, 0, size - count)], dim)


def _roll_by_value(x: Value, shift: Value, dim: int) -> Value:
    """A window of two copies side by side."""
    b, size = x.b, x.shape[dim]
    start = ((-shift) % size + size) % size  # the remainder has the sign of the dividend
    starts = [start.to(torch.int32) if i == dim else 0 for i in range(x.rank)]
    return b.dynamic_slice(b.concat([x, x], dim), starts, x.shape)


@rule("aten::roll")
def roll(b: Builder, x: Value, shifts: list[Operand], dims: list[int]) -> Value:
    if not dims:
        return _roll(b, x.reshape([-1]), shifts[0], 0).reshape(x.shape)
    if not x.rank:
        return x
    for shift, dim in zip(shifts, dims, strict=True):
        x = _roll(b, x, shift, dim % x.rank)
    return x


@rule("aten::pixel_shuffle")
def pixel_shuffle(b: Builder, x: Value, factor: int) -> Value:
    *batch, channels, height, width = x.shape
    n = len(batch)
    x = x.reshape((*batch, channels // factor**2, factor, factor, height, width))
    x = b.transpose(x, [*range(n), n, n + 3, n + 1, n + 4, n + 2])
    return x.reshape(b.outputs[0].shape)


@rule("aten::pixel_unshuffle")
def pixel_unshuffle(b: Builder, x: Value, factor: int) -> Value:
    *batch, channels, height, width = x.shape
    n = len(batch)
    x = x.reshape((*batch, channels, height // factor, factor, width // factor, factor))
    x = b.transpose(x, [*range(n), n, n + 2, n + 4, n + 1, n + 3])
    return x.reshape(b.outputs[0].shape)


@rule("aten::repeat_interleave.Tensor")
def repeat_interleave(b: Builder, repeats: Value, output_size: int | None) -> Value:
    """Index i repeats[i] times; without an output size the operator does not get here."""
    return b.call_jax(_repeated, repeats, length=b.outputs[0].shape[0])


def _repeated(repeats: Array, *, length: int) -> Array:
    import jax.numpy as jnp

    index = jnp.arange(repeats.shape[0], dtype=repeats.dtype)
    return jnp.repeat(index, repeats, total_repeat_length=length)


# ---- padding ----


def _amounts(rank: int, padding: list[int]) -> list[tuple[int, int]]:
    """(before, after) per dimension; PyTorch lists pairs from the last dimension on."""
    pairs = [(padding[i], padding[i + 1]) for i in range(0, len(padding), 2)]
    return [(0, 0)] * (rank - len(pairs)) + pairs[::-1]


@rule("aten::constant_pad_nd")
def constant_pad(b: Builder, x: Value, padding: list[int], value: Operand) -> Value:
    amounts = _amounts(x.rank, padding)
    return b.pad(x, [low for low, _ in amounts], [high for _, high in amounts], value=value)


_REFLECTION = tuple(f"aten::reflection_pad{n}d" for n in (1, 2, 3))
_REPLICATION = tuple(f"aten::replication_pad{n}d" for n in (1, 2, 3))


def _crop(x: Value, dim: int, low: int, high: int) -> Value:
    """Negative amounts cut off."""
    return x.b.slice_dim(x, dim, max(-low, 0), x.shape[dim] - max(-high, 0))


def _pad_dim(x: Value, dim: int, low: int, high: int) -> Value:
    """Zeros before and after `x` along `dim`."""
    lows, highs = [0] * x.rank, [0] * x.rank
    lows[dim], highs[dim] = low, high
    return x.b.pad(x, lows, highs)


@rule(*_REFLECTION)
def reflection_pad(b: Builder, x: Value, padding: list[int]) -> Value:
    for dim, (low, high) in enumerate(_amounts(x.rank, padding)):
        size = x.shape[dim]
        before = [b.flip(b.slice_dim(x, dim, 1, low + 1), [dim])] if low > 0 else []
        after = [b.flip(b.slice_dim(x, dim, size - 1 - high, size - 1), [dim])] if high > 0 else []
        x = b.concat([*before, _crop(x, dim, low, high), *after], dim)
    return x


@rule(*_REPLICATION)
def replication_pad(b: Builder, x: Value, padding: list[int]) -> Value:
    for dim, (low, high) in enumerate(_amounts(x.rank, padding)):
        size = x.shape[dim]
        if size + min(low, 0) + min(high, 0) <= 0:  # more is cut off than there is
            index = [min(max(i - low, 0), size - 1) for i in range(size + low + high)]
            x = b.take(x, b.array(index, torch.int32), dim)
            continue
        before = [_repeat_edge(x, dim, 0, low)] if low > 0 else []
        after = [_repeat_edge(x, dim, size - 1, high)] if high > 0 else []
        x = b.concat([*before, _crop(x, dim, low, high), *after], dim)
    return x


def _repeat_edge(x: Value, dim: int, index: int, times: int) -> Value:
    shape = list(x.shape)
    shape[dim] = times
    return x.b.broadcast_to(x.b.slice_dim(x, dim, index, index + 1), shape)


def _add_at(x: Value, part: Value, dim: int, start: int) -> Value:
    """`x` with `part` added from `start` on along `dim`."""
    return x + _pad_dim(part, dim, start, x.shape[dim] - start - part.shape[dim])


def _unpadded(grad: Value, dim: int, low: int, high: int) -> Value:
    """The gradient of the inside, and zeros for what a negative amount cut off."""
    inside = grad.b.slice_dim(grad, dim, max(low, 0), grad.shape[dim] - max(high, 0))
    return _pad_dim(inside, dim, max(-low, 0), max(-high, 0))


@rule(*(f"{name}_backward" for name in _REFLECTION))
def reflection_pad_backward(b: Builder, grad: Value, x: Value, padding: list[int]) -> Value:
    grad = grad.accumulated()
    for dim, (low, high) in enumerate(_amounts(x.rank, padding)):
        total, inside = grad.shape[dim], _unpadded(grad, dim, low, high)
        size = inside.shape[dim]
        if low > 0:
            part = b.flip(b.slice_dim(grad, dim, 0, low), [dim])
            inside = _add_at(inside, part, dim, 1)
        if high > 0:
            part = b.flip(b.slice_dim(grad, dim, total - high, total), [dim])
            inside = _add_at(inside, part, dim, size - 1 - high)
        grad = inside
    return grad


@rule(*(f"{name}_backward" for name in _REPLICATION))
def replication_pad_backward(b: Builder, grad: Value, x: Value, padding: list[int]) -> Value:
    grad = grad.accumulated()
    for dim, (low, high) in enumerate(_amounts(x.rank, padding)):
        total, inside = grad.shape[dim], _unpadded(grad, dim, low, high)
        if low > 0:
            edge = b.slice_dim(grad, dim, 0, low).sum([dim], keepdim=True)
            inside = _add_at(inside, edge, dim, 0)
        if high > 0:
            edge = b.slice_dim(grad, dim, total - high, total).sum([dim], keepdim=True)
            inside = _add_at(inside, edge, dim, inside.shape[dim] - 1)
        grad = inside
    return grad
