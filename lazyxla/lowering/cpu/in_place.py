"""Writes in place whose source is their target.

XLA's CPU compiler (jaxlib 0.10.2, xla-cpu-pjrt 0.0.1) fuses `dynamic_update_slice` with what
computes the update, and lets the fusion write into the memory of its target. If the target is
reshaped before, it does not see that the update is read from the same memory:

    y = x.reshape(256)                      x of 16 x 16
    y[16:80] = x[:4].reshape(64) + 1        reads rows that it has just written

A call that is not inlined keeps the two apart. tests/lowering/test_in_place.py fails once the
compiler is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lazyxla.lowering.cpu.apart import compute_apart
from lazyxla.lowering.value import Value

_NEVER_FUSED = {
    "stablehlo.convolution",
    "stablehlo.custom_call",
    "stablehlo.dot_general",
    "stablehlo.sort",
}
"""Operations whose results have memory of their own."""

_MOST_OPERATIONS = 256
"""Beyond this many operations the two are assumed to share memory."""


def may_read_what_it_replaces(x: Value, update: Value) -> bool:
    """Whether `update` may be read from the memory in which `x` is."""
    size = math.prod(x.shape)
    targets, sources = _origins(x.ir, size), _origins(update.ir, size)
    return targets is None or sources is None or not targets.isdisjoint(sources)


def _origins(value: Any, size: int) -> set[Any] | None:
    """What an MLIR value is computed from, as far as it has this many elements; None if too
    many."""
    found: set[Any] = set()
    seen: set[Any] = set()
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        if len(seen) > _MOST_OPERATIONS:
            return None
        if math.prod(each.type.shape) == size:
            found.add(each)
        operation = each.owner
        operands = getattr(operation, "operands", ())  # a block, if it is an argument
        if operands and operation.name not in _NEVER_FUSED:
            waiting.extend(operands)
    return found


def update_apart(b: Any, x: Value, update: Value, starts: Sequence[Value]) -> Value:
    """A `dynamic_update_slice` that is not fused; `b` is the builder."""

    def write(target: Value, source: Value, *places: Value) -> Value:
        return b.hlo.dynamic_update_slice(target, source, places)  # type: ignore[no-any-return]

    return compute_apart(b, ("dynamic_update_slice",), write, [x, update, *starts])
