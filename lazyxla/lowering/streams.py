"""Random bits.

Every random operator owns the stream that its pair (seed, ordinal) names, so its numbers depend on
the seed and the order of random calls only. Both generators are counter-based, and the streams of
one seed are disjoint parts of the generator's sequence:

- TPU and CUDA: Philox 4x32-10, key from `seed`, counter (ordinal, block) of 64 bits each.
- CPU: Threefry 2x32-20, key from `seed`, counter (ordinal, block) of 32 bits each, since
  XLA's Philox is two to six times slower there.

XLA's generator is one operation; when it is partitioned, every device makes all numbers. So in a
program for many devices elementwise operations on the elements' indices make the same numbers, and
these can be split like any others. Both generators make blocks of numbers, block after block. If
the last dimension holds whole blocks they are made as they are, and their numbers interleaved; else
each element makes its block, and takes its number from it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from jax import Array

    from lazyxla.lowering.builder import Builder

Stream = tuple[Value, Value]
"""Seed and ordinal, uint64 each."""

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_PHILOX_FACTORS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_STEPS = (0x9E3779B9, 0xBB67AE85)


def bits_of(
    b: Builder, shape: Sequence[int], dtype: torch.dtype, stream: Stream | None = None
) -> Value:
    """The first bits of a stream, by default the current operator's: a uint32 or uint64 value."""
    if not math.prod(shape):
        return b.zeros(shape, dtype)
    seed, ordinal = b.rng if stream is None else stream
    return b.random_bits(shape, dtype, seed, ordinal)


def philox_bits(
    b: Builder, shape: Sequence[int], dtype: torch.dtype, seed: Value, ordinal: Value
) -> Value:
    if b.annotations is not None:
        return philox(b, shape, dtype, seed, ordinal)
    state = [seed, b.constant(0, torch.uint64), ordinal]
    return _generate(b, "PHILOX", state, list(shape) or [1], dtype).reshape(shape)


def threefry_bits(
    b: Builder, shape: Sequence[int], dtype: torch.dtype, seed: Value, ordinal: Value
) -> Value:
    # 64-bit numbers are in the generator's order, without a shuffle.
    start = ordinal << 32
    if b.annotations is not None:
        return threefry(b, shape, dtype, seed, start)
    count = math.prod(shape)
    words = -(-count * dtype.itemsize // 8)
    bits = _generate(b, "THREE_FRY", [seed, start], [words], torch.uint64)
    if dtype != torch.uint64:
        halves = b.hlo.bitcast_convert(b.type(dtype, [words, 2]), bits)
        bits = b.slice_dim(halves.reshape([-1]), 0, 0, count)
    return bits.reshape(shape)


def _generate(
    b: Builder, algorithm: str, state: list[Value], shape: list[int], dtype: torch.dtype
) -> Value:
    initial = b.stack(state, 0)
    kind = b.hlo.RngAlgorithmAttr.get(algorithm)
    types = [initial.type, b.type(dtype, shape)]
    return b.wrap(b.hlo.RngBitGeneratorOp(*types, kind, initial).results)[1]


def threefry(
    b: Builder, shape: Sequence[int], dtype: torch.dtype, seed: Value, start: Value
) -> Value:
    """The numbers of XLA's THREE_FRY for the state (seed, start), two uint64 values, as uint64; or
    as uint32 their halves, the low one first."""
    stacked = b.interleaves_by_stacking(shape)
    static = {"shape": tuple(shape), "bits": 8 * dtype.itemsize, "stacked": stacked}
    result: Value = b.call_jax(_threefry, seed, start, **static)
    return result


def philox(
    b: Builder, shape: Sequence[int], dtype: torch.dtype, seed: Value, ordinal: Value
) -> Value:
    """The numbers of XLA's PHILOX for the state (seed, 0, ordinal), as uint32 or uint64."""
    stacked = b.interleaves_by_stacking(shape)
    static = {"shape": tuple(shape), "bits": 8 * dtype.itemsize, "stacked": stacked}
    result: Value = b.call_jax(_philox, seed, ordinal, **static)
    return result


def _blocks(
    shape: tuple[int, ...], size: int, stacked: bool, make: Callable[[Array], list[Array]]
) -> Array:
    """Numbers of this shape; `make` returns the `size` numbers of each block, given the blocks'
    indices as a uint64 array. `stacked`: how they are interleaved."""
    import jax
    import jax.numpy as jnp

    def flat_index(shape: tuple[int, ...]) -> Array:
        index, stride = jnp.zeros(shape, jnp.uint64), 1
        for dim in reversed(range(len(shape))):
            index += jax.lax.broadcasted_iota(jnp.uint64, shape, dim) * jnp.uint64(stride)
            stride *= shape[dim]
        return index

    if shape and shape[-1] % size == 0:
        numbers = make(flat_index((*shape[:-1], shape[-1] // size)))
        if stacked:
            return jnp.stack(numbers, -1).reshape(shape)
        rows = [(0, 0, 0)] * (len(shape) - 1)
        zero = jnp.zeros((), numbers[0].dtype)
        parts = [
            jax.lax.pad(part, zero, [*rows, (i, size - 1 - i, size - 1)])
            for i, part in enumerate(numbers)
        ]
        return functools.reduce(operator.or_, parts)
    index = flat_index(shape)
    numbers = make(index // jnp.uint64(size))
    return jax.lax.select_n((index % jnp.uint64(size)).astype(jnp.int32), *numbers)


def _low(word: Array) -> Array:
    import jax.numpy as jnp

    return word.astype(jnp.uint32)


def _high(word: Array) -> Array:
    import jax.numpy as jnp

    return (word >> jnp.uint64(32)).astype(jnp.uint32)


def _joined(low: Array, high: Array) -> Array:
    import jax.numpy as jnp

    return low.astype(jnp.uint64) | (high.astype(jnp.uint64) << jnp.uint64(32))


def _threefry(
    seed: Array, start: Array, *, shape: tuple[int, ...], bits: int, stacked: bool
) -> Array:
    """Threefry 2x32-20 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3)."""
    import jax.numpy as jnp

    def make(block: Array) -> list[Array]:
        counter = start + block
        keys = [_low(seed), _high(seed)]
        keys.append(keys[0] ^ keys[1] ^ jnp.uint32(_PARITY))
        x, y = _low(counter) + keys[0], _high(counter) + keys[1]
        for turn in range(5):
            for rotation in _ROTATIONS[turn % 2]:
                x += y
                y = (y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation))
                y ^= x
            x += keys[(turn + 1) % 3]
            y += keys[(turn + 2) % 3] + jnp.uint32(turn + 1)
        return [_joined(x, y)] if bits == 64 else [x, y]

    return _blocks(shape, 64 // bits, stacked, make)


def _philox(
    seed: Array, ordinal: Array, *, shape: tuple[int, ...], bits: int, stacked: bool
) -> Array:
    """Philox 4x32-10 (of the same paper)."""

    def make(block: Array) -> list[Array]:
        w, x, y, z = _philox_words(seed, ordinal, block)
        return [w, x, y, z] if bits == 32 else [_joined(w, x), _joined(y, z)]

    return _blocks(shape, 128 // bits, stacked, make)


def _philox_words(seed: Array, ordinal: Array, block: Array) -> tuple[Array, ...]:
    """The four words of each of the blocks, of which the indices are given as uint64."""
    import jax.numpy as jnp

    def product(factor: int, x: Array) -> tuple[Array, Array]:
        both = x.astype(jnp.uint64) * jnp.uint64(factor)
        return _high(both), _low(both)

    high = jnp.broadcast_to(ordinal, block.shape)
    w, x, y, z = _low(block), _high(block), _low(high), _high(high)
    keys = [_low(seed), _high(seed)]
    for _ in range(10):
        (high0, low0), (high1, low1) = (
            product(factor, word) for factor, word in zip(_PHILOX_FACTORS, (w, y), strict=True)
        )
        w, x, y, z = high1 ^ x ^ keys[0], low1, high0 ^ z ^ keys[1], low0
        steps = zip(keys, _PHILOX_STEPS, strict=True)
        keys = [key + jnp.uint32(step) for key, step in steps]
    return w, x, y, z


def philox_below(
    b: Builder, shape: Sequence[int], limit: Value, seed: Value, ordinal: Value
) -> Value:
    """Which numbers of `philox_bits`, as uint32 without their last byte, are below a float32.

    XLA's generator writes its numbers to memory, for what uses them to read: 4 bytes each. Here the
    four results of a block become the bytes of a word, so that one byte is written for each.
    """
    result: Value = b.call_jax(_philox_below, limit, seed, ordinal, shape=tuple(shape))
    return result


def _philox_below(limit: Array, seed: Array, ordinal: Array, *, shape: tuple[int, ...]) -> Array:
    import jax
    import jax.numpy as jnp

    count = math.prod(shape)
    blocks = jax.lax.iota(jnp.uint64, -(-count // 4))
    packed = jnp.zeros(blocks.shape, jnp.uint32)
    for i, word in enumerate(_philox_words(seed, ordinal, blocks)):
        below = (word >> jnp.uint32(8)).astype(jnp.float32) < limit
        packed |= below.astype(jnp.uint32) << jnp.uint32(8 * i)
    # The first byte of a word is its lowest.
    below = jax.lax.bitcast_convert_type(packed, jnp.uint8) != 0
    return below.reshape(-1)[:count].reshape(shape)
