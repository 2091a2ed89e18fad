"""Reductions of tensors of many dimensions.

XLA's CPU compiler leaves reductions to YNNPACK, whose tensors have eight dimensions at most, and
does not count them (jaxlib 0.10.2, xla-cpu-pjrt 0.0.1): what has more overwrites the stack, and the
process ends. So where a module has such a tensor, each of its reductions is one of a matrix's rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

_MOST = 8


def reduce_in_few_dimensions(b: Builder) -> None:
    """Rewrites the reductions, in all functions of the builder's module."""
    if b.mlir.highest_rank <= _MOST:  # looking at each operation takes a tenth of lowering's time
        return
    operations: list[Any] = []

    def visit(op: Any) -> Any:
        operations.append(op)
        return b.mlir.ir.WalkResult.ADVANCE

    b.module.operation.walk(visit)
    if all(_rank(value) <= _MOST for op in operations for value in (*op.operands, *op.results)):
        return
    for op in operations:
        # XLA may undo a reshape before a reduction, so the ranks of the others do not count.
        if op.name == "stablehlo.reduce" and len(op.results) == 1:
            _reduce_rows(b, op)


def _rank(value: Any) -> int:
    return getattr(value.type, "rank", 0)


def _reduce_rows(b: Builder, op: Any) -> None:
    ir, (x,) = b.mlir.ir, b.wrap([op.operands[0]])
    if not x.rank or any(size < 0 for size in x.shape):
        return
    reduced = list(op.attributes["dimensions"])
    kept = [d for d in range(x.rank) if d not in reduced]
    with ir.InsertionPoint(op), op.location:
        rows = b.transpose(x, [*kept, *reduced])
        sizes = [math.prod(x.shape[d] for d in dims) for dims in (kept, reduced)]
        rows = b.hlo.optimization_barrier([rows.reshape(sizes)])
        sums = op.clone()
        sums.operands[0] = rows.ir
        sums.attributes["dimensions"] = ir.DenseI64ArrayAttr.get([1])
        (result,) = op.results
        sums.results[0].set_type(b.mlir.type(x.dtype, (sizes[0],)))
        op.results[0].replace_all_uses_with(b.hlo.reshape(result.type, b.wrap(sums.results)[0]).ir)
    op.erase()
