"""Functions that the CPU's compiler does not inline.

The compiler fuses what computes a value with each operation that reads it, and so computes it once
for each of them, however many operations it takes; in the order in which the reader goes through
memory, besides. A call that is not inlined computes it once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


def compute_apart(
    b: Builder, key: tuple[Hashable, ...], compute: Callable[..., Value], operands: Sequence[Value]
) -> Value:
    """`compute(*operands)` as such a call.

    Calls of one program with the same `key`, and operands of the same types, share the function.
    The key begins with a name, and has all else that `compute` depends on.
    """
    types = [operand.type for operand in operands]
    whole = (*key, *map(str, types))
    name = b.symbols.get(whole)
    if name is None:
        name = b.symbols[whole] = f"{key[0]}.{len(b.symbols)}"
        b.callees[name] = b.function(name, types, lambda values: [compute(*values)])
    return b.call(b.callees[name], operands, inlined=False)[0]
