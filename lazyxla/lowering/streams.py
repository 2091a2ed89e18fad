"""Random bits that a partitioner can spread: each element is computed from its own place.

XLA's generator is one operation, of which a partitioner has every device make all numbers. Here the
same numbers come of elementwise operations on the places of the elements, which can be split as
anything else. It is a little slower where there is one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

Value = Any

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def bits_by_place(
    b: Builder, shape: Sequence[int], dtype: torch.dtype, seed: Value, start: Value
) -> Value:
    """What XLA's THREE_FRY makes of the state (seed, start), two uint64 values: for row-major
    elements of 64 bits one number each, of narrower types as many of each number as there is room
    for, the lowest bits first. uint8, uint16, uint32 or uint64 elements."""
    result: Value = b.call_jax(
        _threefry, seed, start, shape=tuple(shape), bits=8 * dtype.itemsize
    )
    return result


def _threefry(seed: Any, start: Any, *, shape: tuple[int, ...], bits: int) -> Any:
    """Threefry 2x32-20 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3)."""
    import jax
    import jax.numpy as jnp

    place, stride = jnp.zeros(shape, jnp.uint64), 1
    for dim in reversed(range(len(shape))):
        place += jax.lax.broadcasted_iota(jnp.uint64, shape, dim) * jnp.uint64(stride)
        stride *= shape[dim]
    numbers = 64 // bits
    counter = start + place // jnp.uint64(numbers)

    def low(word: Any) -> Any:
        return word.astype(jnp.uint32)

    def high(word: Any) -> Any:
        return (word >> jnp.uint64(32)).astype(jnp.uint32)

    keys = [low(seed), high(seed)]
    keys.append(keys[0] ^ keys[1] ^ jnp.uint32(_PARITY))
    x, y = low(counter) + keys[0], high(counter) + keys[1]
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x += y
            y = (y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation))
            y ^= x
        x += keys[(block + 1) % 3]
        y += keys[(block + 2) % 3] + jnp.uint32(block + 1)
    word = x.astype(jnp.uint64) | (y.astype(jnp.uint64) << jnp.uint64(32))
    word >>= (place % jnp.uint64(numbers)) * jnp.uint64(bits)
    return word.astype({8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}[bits])
