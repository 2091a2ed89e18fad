"""Sums of what is computed, as matmuls with ones.

XLA's CPU compiler writes to memory what is computed to be summed, and then adds 32 elements at a
time, one after the other: of a product of 2 x 256 x 56 x 56 the sums over the last two dimensions
take 0.7 ms, as a matmul 0.35 (two CPUs of an AMD EPYC); the mean of the squares of a million
numbers takes 0.56 ms, and 0.18 (of an Intel Xeon with AVX-512). What is in memory already, YNNPACK
sums at once.

Times are of float32.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.builder.contract import DotOperand
from lazyxla.lowering.cpu.stored import elementwise_operands
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

_LEAST_ROWS, _MOST_ADDED = 64, 4096
"""Rows from which a matmul sums them faster, and how many terms it may add one after the other: of
768 positive ones the result is off by one unit of the last place, of 4096 by three, by XLA's own
form by two. Twice as many if they have no other parts, where it is off by five."""

_MANY = 1 << 15
"""Elements from which on a matmul sums fewer rows faster, too: the mean of 10,000 squares takes as
long in either form, of 100,000 0.02 ms and 0.05 (two CPUs of an Intel Xeon)."""

_LONG_PART = 256
"""A matmul sums the last dimensions as they are from this many terms on; else parts of more."""

_SHORT_PART = 16
"""No matmul sums fewer terms."""

_REPEATED = ("stablehlo.broadcast_in_dim", "stablehlo.constant")

_FOUND = {
    f"stablehlo.{name}"
    for name in ("concatenate", "dynamic_slice", "gather", "iota", "pad", "reverse", "slice")
} | {"stablehlo.transpose"}
"""Operations that XLA fuses, too. In parts' shape it finds the index of each element by divisions:
the cross entropy of 16 images of 224 x 224 in three classes takes 6.1 ms, and 2.4 without."""

_MOST = 64
"""Values that are followed to find what another is computed from."""


def sum_by_matmul(b: Builder, x: Value, first: int) -> Value | None:
    """The sums of `x` over the dimensions from `first` on, of the shape of the others; None where
    XLA's own form is the better one."""
    if x.dtype != torch.float32 or not _is_computed(b, x):
        return None
    rows = math.prod(x.shape[:first])
    sources = _sources(b, x)
    memory = next((y.shape for y in sources if _is_in_memory(y)), x.shape)
    before = _dimensions_of(rows, memory)
    shape = _in_parts(x.shape, first) if before is None else _in_parts(memory, before)
    if shape is None or not (all(map(_is_in_memory, sources)) or _joins_last(x.shape, shape)):
        return None
    *parts, terms = shape
    ones = b.broadcast_to(b.constant(1, x.dtype), [terms])
    left = DotOperand(x.reshape(shape), [len(parts)], [])
    sums = b.plain_dot(left, DotOperand(ones, [0], []), None)
    return sums.reshape([rows, -1]).sum([1]).reshape(x.shape[:first])


def _is_computed(b: Builder, x: Value) -> bool:
    """Whether a loop computes it, rather than that it is in memory."""
    while getattr(x.owner, "name", None) == "stablehlo.reshape":
        x = b.operand(x.owner)
    return elementwise_operands(b, x) is not None


def _sources(b: Builder, x: Value) -> list[Value]:
    """What `x` is computed from, element by element."""
    found: list[Value] = []
    seen, waiting = {x.ir}, [x]
    while waiting:
        y = waiting.pop()
        name = getattr(y.owner, "name", None)
        reshaped = name == "stablehlo.reshape"
        operands = [b.operand(y.owner)] if reshaped else elementwise_operands(b, y)
        if operands is not None and len(seen) < _MOST:
            given = [z for z in operands if z.ir not in seen]
            seen |= {z.ir for z in given}
            waiting += reversed(given)
        elif name not in _REPEATED:
            found.append(y)
    return found


def _is_in_memory(x: Value) -> bool:
    """Whether the loop that sums reads it, rather than finds for each element where it is from."""
    return getattr(x.owner, "name", None) not in _FOUND


def _joins_last(old: Sequence[int], new: Sequence[int]) -> bool:
    """Whether the last dimension of `new` is all of the last ones of `old`."""
    return [*old[: len(new) - 1]] == [*new[:-1]]


def _dimensions_of(rows: int, shape: Sequence[int]) -> int | None:
    """How many of the first dimensions have so many elements."""
    counts = itertools.accumulate(shape, operator.mul, initial=1)
    return next((dims for dims, count in enumerate(counts) if count == rows), None)


def _in_parts(shape: Sequence[int], first: int) -> list[int] | None:
    """A shape of the same elements, in which a matmul may sum the last dimension, then all others
    from `first` on; None if there is none."""
    elements = math.prod(shape)
    most = min(elements // _LEAST_ROWS, _MOST_ADDED)
    few = math.prod(shape[:first]) < _LEAST_ROWS and elements < _MANY
    if few or most < _SHORT_PART:
        return None
    after, terms = len(shape), 1
    while after > first and terms * shape[after - 1] <= most:
        after -= 1
        terms *= shape[after]
    if after > first and terms < _LONG_PART:
        *rows, last = shape[:after]
        part = _divisor(last * terms, most) or _divisor(last * terms, 2 * most)
        if part is not None:
            return [*rows, last * terms // part, part]
    return [*shape[:after], terms] if terms >= _SHORT_PART else None


def _divisor(terms: int, most: int) -> int | None:
    """The length of equal parts, the longest up to `most`."""
    for parts in range(-(-terms // most), min(terms // _SHORT_PART, _MOST_ADDED) + 1):
        if terms % parts == 0:
            return terms // parts
    return None
