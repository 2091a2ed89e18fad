"""Grouped matmul on TPUs by a kernel: each tile of rows meets only the groups that have rows in
it, where XLA multiplies all rows by every group's matrix.

The sizes of the groups are data, and so is the number of steps: a table, computed before, says
which tile of rows each step is about and which group (`_schedule`). Steps of one tile follow each
other, as do those of one group, so that their accumulator is kept in the chip's memory.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules import grouped_matmul as plain
from lazyxla.lowering.tpu.kernels import LANES, matmul_precision, multiplies, tile
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


_ROWS, _INNER, _COLUMN_BYTES = 512, 512, 2048
"""A tile at most. Two of each operand and of the result, the sum, and of operands in float32 their
parts in bfloat16 must fit in the 16 MiB that a kernel has."""


@rule("aten::_grouped_mm", platforms=("tpu",))
def grouped_mm(b: Builder, x: Value, y: Value, ends: Value | None, *rest: Any) -> Value:
    result = None if ends is None else _grouped(b, x, y, ends)
    return plain.grouped_mm(b, x, y, ends, *rest) if result is None else result


def _grouped(b: Builder, x: Value, y: Value, ends: Value) -> Value | None:
    """The matmul by a kernel, or None if none takes these operands."""
    if x.rank == 3:  # the columns of the result are the rows of its transpose
        result = _grouped(b, b.transpose(y, [1, 0]), b.transpose(x, [0, 2, 1]), ends)
        return None if result is None else b.transpose(result, [1, 0])
    columns, inner = y.shape[-1], x.shape[1]
    precision = matmul_precision(b, x)
    if y.rank == 2:
        x = b.transpose(x, [1, 0])
        if not suits(b, x, columns, x.shape[1]):
            return None
        return b.call_jax(sums_in_groups, x, y, ends, precision=precision)
    if not suits(b, x, columns, inner):
        return None
    found = b.untransposed(y)
    transposed = found is not None and found[1] == [0, 2, 1]
    y = found[0] if found is not None and transposed else y
    return b.call_jax(rows_in_groups, x, y, ends, transposed=transposed, precision=precision)


def suits(b: Builder, x: Value, free: int, inner: int) -> bool:
    """Whether the kernels take operands of x's type; `free` and `inner` are what they divide into
    tiles beside the rows in groups: sizes of the result, and of what is summed over."""
    is_whole = free > 0 and inner > 0 and free % LANES == inner % LANES == 0
    return b.annotations is None and multiplies(b, x.dtype) and is_whole


def rows_in_groups(
    x: Any, y: Any, ends: Any, *, transposed: bool, precision: str, interpret: bool = False
) -> Any:
    """For JAX: (M, K) and (G, K, N), or (G, N, K) if `transposed`, to (M, N); zeros after the last
    group."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (rows, inner), groups = x.shape, len(y)
    columns = y.shape[1 if transposed else 2]
    height, depth = _height(rows, groups), tile(inner, _INNER)
    width = tile(columns, _COLUMN_BYTES // x.dtype.itemsize)

    def body(tiles: Any, group_of: Any, starts: Any, *refs: Any) -> None:
        x_ref, y_ref, out_ref, total = refs
        step, part = pl.program_id(1), pl.program_id(2)
        group = group_of[step]

        @pl.when(part == 0)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        @pl.when(group < groups)
        def _() -> None:
            total[...] += _dot(x_ref[...], y_ref[...], 1, 1 if transposed else 0)

        @pl.when(part == pl.num_programs(2) - 1)
        def _() -> None:
            own = _is_own(starts, group, tiles[step] * height, total.shape)
            is_first = (step == 0) | (tiles[step] != tiles[jnp.maximum(step - 1, 0)])
            before = jnp.where(is_first, 0.0, out_ref[...].astype(jnp.float32))
            out_ref[...] = jnp.where(own, total[...], before).astype(out_ref.dtype)

    def of_group(n: Any, step: Any, k: Any, tiles: Any, group_of: Any, starts: Any) -> Any:
        group = jnp.minimum(group_of[step], groups - 1)
        return (group, n, k) if transposed else (group, k, n)

    with jax.enable_x64(False), jax.default_matmul_precision(precision):
        # The rows after the last group are one more group, whose result is 0.
        ends = jnp.concatenate([ends, jnp.full(1, rows, ends.dtype)])
        starts, tiles, group_of, steps = _schedule(ends, rows, height, with_empty=False)
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(columns // width, steps, inner // depth),
            in_specs=[
                pl.BlockSpec((height, depth), lambda n, step, k, tiles, *_: (tiles[step], k)),
                pl.BlockSpec((None, *((width, depth) if transposed else (depth, width))), of_group),
            ],
            out_specs=pl.BlockSpec((height, width), lambda n, step, k, tiles, *_: (tiles[step], n)),
            scratch_shapes=[pltpu.VMEM((height, width), jnp.float32)],
        )
        read = x.size * (columns // width) + len(tiles) * inner * columns
        call = _call(body, spec, (rows, columns), x.dtype, rows * inner * columns, read, interpret)
        return call(tiles, group_of, starts, x, y)


def sums_in_groups(x: Any, y: Any, ends: Any, *, precision: str, interpret: bool = False) -> Any:
    """For JAX: (M, K) and (M, N) to (G, K, N), the matmuls of each group's rows."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (rows, left), columns, groups = x.shape, y.shape[1], len(ends)
    height, depth = _height(rows, groups), tile(left, _INNER)
    width = tile(columns, _COLUMN_BYTES // x.dtype.itemsize)

    def body(tiles: Any, group_of: Any, starts: Any, *refs: Any) -> None:
        *operands, out_ref, total = refs
        step = pl.program_id(2)
        group = group_of[step]

        @pl.when((step == 0) | (group != group_of[jnp.maximum(step - 1, 0)]))
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        # Zeros for the rows of others in both: what is behind the last row may be anything.
        first = tiles[step] * height
        own, other = (
            jnp.where(_is_own(starts, group, first, ref.shape), ref[...].astype(jnp.float32), 0.0)
            for ref in operands
        )
        total[...] += _dot(own.astype(out_ref.dtype), other.astype(out_ref.dtype), 0, 0)
        out_ref[...] = total[...].astype(out_ref.dtype)  # what its last step leaves is written

    with jax.enable_x64(False), jax.default_matmul_precision(precision):
        starts, tiles, group_of, steps = _schedule(ends, rows, height, with_empty=True)
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(left // depth, columns // width, steps),
            in_specs=[
                pl.BlockSpec((height, depth), lambda k, n, step, tiles, *_: (tiles[step], k)),
                pl.BlockSpec((height, width), lambda k, n, step, tiles, *_: (tiles[step], n)),
            ],
            out_specs=pl.BlockSpec(
                (None, depth, width), lambda k, n, step, tiles, group_of, _: (group_of[step], k, n)
            ),
            scratch_shapes=[pltpu.VMEM((depth, width), jnp.float32)],
        )
        read = len(tiles) * height * (left * (columns // width) + columns * (left // depth))
        shape = (groups, left, columns)
        call = _call(body, spec, shape, x.dtype, rows * left * columns, read, interpret)
        return call(tiles, group_of, starts, x, y)


def _call(
    body: Any, spec: Any, shape: tuple[int, ...], dtype: Any, products: int, read: int,
    interpret: bool,
) -> Any:  # fmt: skip
    import jax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    return pl.pallas_call(
        body,
        name="grouped_matmul",
        grid_spec=spec,
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3),
        cost_estimate=pl.CostEstimate(
            flops=2 * products,
            transcendentals=0,
            bytes_accessed=(read + math.prod(shape)) * dtype.itemsize,
        ),
        interpret=interpret,
    )


def _schedule(ends: Any, rows: int, height: int, with_empty: bool) -> tuple[Any, ...]:
    """Where each group starts, and the end; the tile and the group of each step, for as many steps
    as there can be; and how many there are. A group is in every tile that has one of its rows; one
    without rows is `with_empty` in one tile."""
    import jax.numpy as jnp

    tiles = -(-rows // height)
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends])
    first, last = starts[:-1] // height, (starts[1:] - 1) // height
    counts = jnp.where(starts[1:] > starts[:-1], last - first + 1, int(with_empty))
    until = jnp.cumsum(counts)
    steps = jnp.arange(tiles + len(ends), dtype=ends.dtype)
    group = jnp.minimum(jnp.searchsorted(until, steps, side="right"), len(ends) - 1)
    tile = first[group] + steps - (until - counts)[group]
    return starts, jnp.minimum(tile, tiles - 1), group.astype(ends.dtype), until[-1]


def _is_own(starts: Any, group: Any, first: Any, shape: tuple[int, ...]) -> Any:
    """Which rows of a tile, whose first one is given, are of the group; of `shape`."""
    import jax
    import jax.numpy as jnp

    row = first + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return (row >= starts[group]) & (row < starts[group + 1])


def _dot(x: Any, y: Any, of_x: int, of_y: int) -> Any:
    import jax
    import jax.numpy as jnp

    numbers = (((of_x,), (of_y,)), ((), ()))
    return jax.lax.dot_general(x, y, numbers, preferred_element_type=jnp.float32)


def _height(rows: int, groups: int) -> int:
    """Rows of a tile: not many more than a group has on average."""
    height = LANES
    while height < _ROWS and height * groups < rows:
        height *= 2
    return min(height, rows)
