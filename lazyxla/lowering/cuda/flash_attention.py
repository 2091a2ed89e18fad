"""Attention for NVIDIA's GPUs in Pallas, which XLA compiles with Triton.

It is FlashAttention-2 (Dao 2023, arXiv:2307.08691): the kernels compute the scores (N, H, S, T)
tile by tile and never write them.

Arrays are as in rules/attention.py: queries (N, H, S, D), keys and values (N, G, T, D), of any S
and T. Tiles have powers of 2 as sizes: what they hold beyond an array's end is read as zeros and
not written.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from jax import Array

INTERPRET = False
"""Whether JAX interprets the kernels, for tests on the CPU."""

_LOG2_E = math.log2(math.e)

LEAST_TILE = 16
"""The least size of a tile for Triton's matmuls."""


class Form(NamedTuple):
    """What the kernels are made for, besides shapes and dtypes."""

    is_causal: bool
    factor: float
    """The scores' scale."""

    masked: bool
    """After the values there is an array (N | 1, H | 1, S | 1, T): numbers that are added to the
    scores, or bools that are true where a score remains."""

    dropped: bool
    """The last arrays are (N, H, S, T) of bools, true where a weight remains, and (N, H)
    in float32, what these are multiplied with."""


class Sizes(NamedTuple):
    """Rows and columns of a kernel's tile of scores, and how Triton compiles it."""

    rows: int
    columns: int
    warps: int
    stages: int


def flash_attention(
    query: Array, key: Array, value: Array, *extra: Array, form: Form, sizes: Sizes
) -> tuple[Array, Array]:
    """The result (N, H, S, D), and the logarithm of each row's sum (N, H, S) in float32."""
    kernel = _Kernel(query.shape, key.shape, form, sizes)
    inputs = [(query, "rd"), (key, "cd"), (value, "cd"), *_named(extra, form)]
    results = [(query.shape, query.dtype, "rd"), (query.shape[:3], "float32", "r")]
    result, sums = kernel.call(_forward, kernel.row_tiles, inputs, results)
    return result, sums


def flash_attention_backward(
    grad: Array,
    query: Array,
    key: Array,
    value: Array,
    result: Array,
    logsumexp: Array,
    *extra: Array,
    form: Form,
    sizes: Sizes,
) -> tuple[Array, ...]:
    """The gradients of query, key and value."""
    along = (grad.astype("float32") * result.astype("float32")).sum(-1)
    inputs = [(query, "rd"), (key, "cd"), (value, "cd"), (grad, "rd"), (logsumexp, "r")]
    inputs += [(along, "r"), *_named(extra, form)]

    kernel = _Kernel(query.shape, key.shape, form, sizes)
    of_rows = [(query.shape, query.dtype, "rd")]
    (of_query,) = kernel.call(_backward_query, kernel.row_tiles, inputs, of_rows)

    # Where heads share one of keys, each has its own part of that one's gradient.
    samples, heads, columns, dim = *query.shape[:2], *key.shape[2:]
    groups = key.shape[1]
    dtype = key.dtype if groups == heads else "float32"
    parts = [((samples, heads, columns, dim), dtype, "cd")] * 2
    others = kernel.call(_backward_key, kernel.column_tiles, inputs, parts)
    if groups < heads:
        shape = (samples, groups, heads // groups, columns, dim)
        others = [x.reshape(shape).sum(2).astype(key.dtype) for x in others]
    return of_query, *others


def _named(extra: Sequence[Array], form: Form) -> list[tuple[Array, str]]:
    """The arrays that only some forms have, with the names of their dimensions."""
    names = ["rc"] * form.masked + ["rc", ""] * form.dropped
    return list(zip(extra, names, strict=True))


class _Kernel:
    """A grid of tiles of rows or columns, of heads and of samples; and what its instances do alike.

    The dimensions of an array after samples and heads have names: r(ows), c(olumns), d(imension of
    a head).
    """

    def __init__(self, query: Sequence[int], key: Sequence[int], form: Form, sizes: Sizes) -> None:
        self.samples, self.heads, rows, dim = query
        self.form, self.sizes = form, sizes
        self.lengths = {"r": rows, "c": key[2], "d": dim}
        padded_dim = max(1 << (dim - 1).bit_length(), LEAST_TILE)
        self.tile = {"r": sizes.rows, "c": sizes.columns, "d": padded_dim}
        self.row_tiles = -(-rows // sizes.rows)
        self.column_tiles = -(-key[2] // sizes.columns)

    def call(
        self,
        body: Any,
        tiles: int,
        inputs: Sequence[tuple[Array, str]],
        results: Sequence[tuple[tuple[int, ...], Any, str]],
    ) -> Any:
        """Runs an instance for each of so many tiles of each head."""
        import jax
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import triton

        # For Triton a bool is a bit.
        xs = [x.astype("int8") if x.dtype == bool else x for x, _ in inputs]
        options = {"num_warps": self.sizes.warps, "num_stages": self.sizes.stages}
        with jax.enable_x64(False):
            return pl.pallas_call(
                functools.partial(body, self),
                grid=(tiles, self.heads, self.samples),
                in_specs=[self._block(x.shape, names) for x, names in inputs],
                out_specs=[self._block(shape, names) for shape, _, names in results],
                out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in results],
                compiler_params=triton.CompilerParams(**options),
                interpret=INTERPRET,
                name=f"attention{body.__name__}",
            )(*xs)

    def _block(self, shape: Sequence[int], names: str) -> Any:
        """What an instance sees of an array: all that its head has, in whole tiles."""
        from jax.experimental import pallas as pl

        samples, heads, *lengths = shape
        shared = self.heads // heads

        def index(tile: Any, head: Any, sample: Any) -> tuple[Any, ...]:
            head = head if shared == 1 else head // shared
            return (0 if samples == 1 else sample, head, *[0] * len(names))

        whole = [
            1 if length == 1 and names == "rc" else -(-length // self.tile[name]) * self.tile[name]
            for length, name in zip(lengths, names, strict=True)
        ]
        return pl.BlockSpec((None, None, *whole), index)

    def _part(self, ref: Any, names: str, starts: Sequence[Any]) -> tuple[Any, Any]:
        """A tile of an array from these rows and columns on, and which of its elements there are;
        None for all. Of a dimension 1 it takes the one element."""
        import jax.numpy as jnp
        from jax.experimental import pallas as pl

        index: list[Any] = []
        mask = None
        kept, given = names.replace("1", ""), iter(starts)
        zero: Any = np.int32(0)  # for JAX's interpreter all starts have the same type
        for name in names:
            if name == "1":
                index.append(zero)
                continue
            length, size = self.lengths[name], self.tile[name]
            start = zero if name == "d" else next(given)
            index.append(pl.ds(start, size))
            if length % size:
                others = [dim for dim, other in enumerate(kept) if other != name]
                inside = jnp.expand_dims(start + jnp.arange(size) < length, others)
                mask = inside if mask is None else mask & inside
        return ref.at[tuple(index)], mask

    def load(self, ref: Any, names: str, *starts: Any) -> Any:
        from jax.experimental.pallas import triton

        part, mask = self._part(ref, names, starts)
        return triton.load(part) if mask is None else triton.load(part, mask=mask, other=0)

    def store(self, ref: Any, x: Any, names: str, *starts: Any) -> None:
        from jax.experimental.pallas import triton

        part, mask = self._part(ref, names, starts)
        triton.store(part, x.astype(ref.dtype), mask=mask)

    def tiles_seen(self, row: Any) -> Any:
        """How many tiles of columns the tile of rows from this one on sees."""
        import jax.numpy as jnp

        if not self.form.is_causal:
            return self.column_tiles
        height, width = self.sizes[:2]
        return jnp.minimum(self.column_tiles, (row + height + width - 1) // width)

    def scores(self, query: Any, key: Any, extra: Sequence[Any], row: Any, column: Any) -> Any:
        """A tile of scores, from this row and column on; -inf if they are masked."""
        import jax.numpy as jnp

        scores = _dot(query, key, 1, 1) * self.form.factor
        if self.form.masked:
            mask = self._of_scores(extra[0], row, column)
            if mask.dtype == jnp.int8:
                scores = jnp.where(mask != 0, scores, -jnp.inf)
            else:
                scores += mask.astype(jnp.float32)
        columns = column + jnp.arange(self.sizes.columns)[None, :]
        if self.form.is_causal:
            rows = row + jnp.arange(self.sizes.rows)[:, None]
            scores = jnp.where(columns <= rows, scores, -jnp.inf)
        if self.lengths["c"] % self.sizes.columns:
            scores = jnp.where(columns < self.lengths["c"], scores, -jnp.inf)
        return scores

    def drop(self, weights: Any, extra: Sequence[Any], row: Any, column: Any) -> Any:
        """The weights of a tile, or their gradients, after dropout."""
        import jax.numpy as jnp

        if not self.form.dropped:
            return weights
        kept, factor = extra[-2:]
        return jnp.where(self._of_scores(kept, row, column) != 0, weights * factor[...], 0)

    def _of_scores(self, ref: Any, row: Any, column: Any) -> Any:
        """A tile of an array (S, T), or (1, T)."""
        if ref.shape[0] > 1:
            return self.load(ref, "rc", row, column)
        return self.load(ref, "1c", column)[None, :]


def _forward(kernel: _Kernel, *refs: Any) -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    query_ref, key_ref, value_ref, *extra, result_ref, sums_ref = refs
    height, width = kernel.sizes[:2]
    tile = pl.program_id(0)
    row = tile * height
    query = kernel.load(query_ref, "rd", row)

    def step(i: Any, state: Any) -> Any:
        result, peak, total = state
        column = i * width
        key, value = (kernel.load(ref, "cd", column) for ref in (key_ref, value_ref))
        scores = kernel.scores(query, key, extra, row, column)
        peak_now = jnp.maximum(peak, scores.max(1))
        base = _finite(peak_now)
        weights = _exp(scores - base[:, None])
        shrink = _exp(peak - base)
        total = total * shrink + weights.sum(1)
        kept = kernel.drop(weights, extra, row, column).astype(value.dtype)
        return result * shrink[:, None] + _dot(kept, value, 1, 0), peak_now, total

    end = kernel.tiles_seen(row)
    result = jnp.zeros((height, kernel.tile["d"]), jnp.float32)
    peak, total = jnp.full(height, -jnp.inf), jnp.zeros(height, jnp.float32)
    result, peak, total = jax.lax.fori_loop(0, end, step, (result, peak, total))
    kernel.store(result_ref, result / jnp.where(total == 0, 1, total)[:, None], "rd", row)
    kernel.store(sums_ref, _finite(peak) + jnp.log(total), "r", row)


def _backward_query(kernel: _Kernel, *refs: Any) -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    query_ref, key_ref, value_ref, grad_ref, sums_ref, along_ref, *extra, result_ref = refs
    height, width = kernel.sizes[:2]
    row = pl.program_id(0) * height
    query, grad = (kernel.load(ref, "rd", row) for ref in (query_ref, grad_ref))
    sums, along = (kernel.load(ref, "r", row) for ref in (sums_ref, along_ref))

    def step(i: Any, result: Any) -> Any:
        column = i * width
        key, value = (kernel.load(ref, "cd", column) for ref in (key_ref, value_ref))
        scores = kernel.scores(query, key, extra, row, column)
        weights = _exp(scores - _finite(sums)[:, None])
        above = kernel.drop(_dot(grad, value, 1, 1), extra, row, column)
        of_scores = (weights * (above - along[:, None])).astype(key.dtype)
        return result + _dot(of_scores, key, 1, 0)

    end = kernel.tiles_seen(row)
    result = jnp.zeros((height, kernel.tile["d"]), jnp.float32)
    result = jax.lax.fori_loop(0, end, step, result)
    kernel.store(result_ref, result * kernel.form.factor, "rd", row)


def _backward_key(kernel: _Kernel, *refs: Any) -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    query_ref, key_ref, value_ref, grad_ref, sums_ref, along_ref, *rest = refs
    *extra, of_key_ref, of_value_ref = rest
    height, width = kernel.sizes[:2]
    column = pl.program_id(0) * width
    key, value = (kernel.load(ref, "cd", column) for ref in (key_ref, value_ref))

    def step(i: Any, state: Any) -> Any:
        of_key, of_value = state
        row = i * height
        query, grad = (kernel.load(ref, "rd", row) for ref in (query_ref, grad_ref))
        sums, along = (kernel.load(ref, "r", row) for ref in (sums_ref, along_ref))
        scores = kernel.scores(query, key, extra, row, column)
        weights = _exp(scores - _finite(sums)[:, None])
        kept = kernel.drop(weights, extra, row, column).astype(grad.dtype)
        above = kernel.drop(_dot(grad, value, 1, 1), extra, row, column)
        of_scores = (weights * (above - along[:, None])).astype(query.dtype)
        return of_key + _dot(of_scores, query, 0, 0), of_value + _dot(kept, grad, 0, 0)

    start = column // height if kernel.form.is_causal else 0
    zeros = jnp.zeros((width, kernel.tile["d"]), jnp.float32)
    of_key, of_value = jax.lax.fori_loop(start, kernel.row_tiles, step, (zeros, zeros))
    kernel.store(of_key_ref, of_key * kernel.form.factor, "cd", column)
    kernel.store(of_value_ref, of_value, "cd", column)


def _dot(x: Any, y: Any, of_x: int, of_y: int) -> Any:
    """The matmul over these dimensions, in float32."""
    import jax

    dims = (((of_x,), (of_y,)), ((), ()))
    return jax.lax.dot_general(x, y, dims, preferred_element_type="float32")


def _exp(x: Any) -> Any:
    """As GPUs compute it. Scores themselves do not have the base 2: a mask of the least number
    would be -inf then."""
    import jax.numpy as jnp

    return jnp.exp2(x * _LOG2_E)


def _finite(x: Any) -> Any:
    """0 for -inf: of a row that is masked as a whole."""
    import jax.numpy as jnp

    return jnp.where(x == -jnp.inf, 0, x)
