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
from lazyxla.lowering.cpu.stored import POINTWISE
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

_DEPTH = 64
"""Operations that are followed to find what a value is computed from."""


def sum_by_matmul(b: Builder, x: Value, first: int) -> Value | None:
    """The sums of `x` over the dimensions from `first` on, of the shape of the others; None where
    XLA's own form is the better one."""
    if x.dtype != torch.float32 or not is_computed(b, x):
        return None
    rows = math.prod(x.shape[:first])
    memory = _shape_in_memory(b, x)
    before = _dimensions_of(rows, memory)
    shape = _in_parts(x.shape, first) if before is None else _in_parts(memory, before)
    if shape is None:
        return None
    *parts, terms = shape
    ones = b.broadcast_to(b.constant(1, x.dtype), [terms])
    left = DotOperand(x.reshape(shape), [len(parts)], [])
    sums = b.plain_dot(left, DotOperand(ones, [0], []), None)
    return sums.reshape([rows, -1]).sum([1]).reshape(x.shape[:first])


def is_computed(b: Builder, x: Value) -> bool:
    """Whether a loop computes it, rather than that it is in memory."""
    while (name := getattr(x.owner, "name", None)) == "stablehlo.reshape":
        x = b.operand(x.owner)
    return name in POINTWISE


def _shape_in_memory(b: Builder, x: Value) -> Sequence[int]:
    """Of the first value that `x` is computed from, element by element."""
    for _ in range(_DEPTH):
        name = getattr(x.owner, "name", None)
        if name != "stablehlo.reshape" and name not in POINTWISE:
            break
        operands = b.wrap(x.owner.operands)
        given = (y for y in operands if y.rank and getattr(y.owner, "name", None) not in _REPEATED)
        x = next(given, x)
    return x.shape


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
