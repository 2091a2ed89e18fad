"""Attention on TPUs by the kernel that JAX ships for them, splash attention, which computes the
scores (N, H, S, T) tile by tile in the chip's own memory and never writes them.

It has no argument for the scale, so the smaller of queries and keys is scaled before, and rounded
once more in bfloat16 if the scale is no power of two; their gradient is scaled after. Its mask is
known when a program is compiled: causal, none, or any pattern; tiles that it excludes are skipped.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lazyxla.lowering.jax_call import annotate_kernel_costs, find_module
from lazyxla.lowering.tpu.kernels import LANES, matmul_precision, multiplies, tile
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from jax import Array

    from lazyxla.lowering.builder import Builder


_TILE = 512
"""Rows and columns of a tile at most: its scores in float32 are 1 of 16 MiB that a kernel has."""

_LEAST_SCORES = 512 * 512
"""Rows times columns from which on the kernel is taken: where it saves memory.

Forward and backward in bfloat16, by libtpu for v5e, at most MiB with plain matmuls and with the
kernel:

    samples  heads  rows  numbers    plain  kernel
         64      8   256      128      416     384
         32      8   512      128      640     361
         16      8  1024      128     1024     364
         64     12   256       64      480     480
         32     12   512       64      768     480
         16     12  1024       64     1344     528
"""


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Which keys each query sees, every one at least one. Patterns of one digest are equal."""

    digest: str
    seen: np.ndarray = dataclasses.field(compare=False, repr=False)
    """[rows, columns] of bool."""


Mask = bool | Pattern
"""Causal or none, or a pattern."""


def suits(
    b: Builder, query: Value, key: Value, mask: Value | None = None, dropout: bool = False, /
) -> bool:
    """Whether attention of queries (N, H, S, D) to keys (N, G, T, D) is for the kernel."""
    samples, _, rows, size = query.shape
    columns = key.shape[2]
    return (
        mask is None
        and not dropout
        and multiplies(b, query.dtype)
        and samples * size > 0
        and rows % LANES == columns % LANES == 0
        and rows * columns >= _LEAST_SCORES
        and _kernel() is not None
    )


def forward(
    b: Builder,
    query: Value,
    key: Value,
    value: Value,
    pattern: Mask,
    factor: Operand,
    mask: Value | None = None,
    dropped: Sequence[Value] = (),
) -> tuple[Value, Value]:
    """See `AttentionKernel`."""
    query, key = _scaled(b, query, key, factor)
    kwargs = {"mask": pattern, "precision": matmul_precision(b, query)}
    result, sums = b.call_jax(splash_attention, query, key, value, **kwargs)
    _annotate_costs(b, result, query, key, pattern)
    return result, sums


def backward(
    b: Builder,
    grad: Value,
    inputs: tuple[Value, ...],
    pattern: Mask,
    factor: Operand,
    mask: Value | None = None,
    dropped: Sequence[Value] = (),
) -> tuple[Value, ...]:
    """See `AttentionKernel`."""
    query, key, *others = inputs
    query, key = _scaled(b, query, key, factor)
    kwargs = {"mask": pattern, "precision": matmul_precision(b, query)}
    results = b.call_jax(splash_attention_backward, grad, query, key, *others, **kwargs)
    _annotate_costs(b, results[0], query, key, pattern)
    return *_scaled(b, results[0], results[1], factor), results[2]


def _scaled(b: Builder, query: Value, key: Value, factor: Operand) -> tuple[Value, Value]:
    """Scores are linear in both: what is scaled is the one with fewer elements."""
    if math.prod(key.shape) < math.prod(query.shape):
        return query, _times(b, key, factor)
    return _times(b, query, factor), key


def _times(b: Builder, x: Value, factor: Operand) -> Value:
    """In float32: a factor in bfloat16 would be off by the same part for all scores."""
    return b.scale(x.to(torch.float32), factor).to(x.dtype)


# Matmuls of rows and columns in each kernel, by a part of its name.
_MATMULS = {"_fwd_": 2, "_dq_": 3, "_dkv_": 4}


def _annotate_costs(b: Builder, result: Value, query: Value, key: Value, mask: Mask) -> None:
    """Declares to XLA the cost of the kernels that made `result`: it cannot inspect them.

    What they read is taken to be queries once, and keys and values once for each row of tiles.
    """
    (samples, heads, rows, size), columns = query.shape, key.shape[2]
    tiles = _tiles(rows, columns, mask)
    scores = samples * heads * tiles * _tile(rows) * _tile(columns)
    moved = 2 * samples * heads * size * (rows + tiles * _tile(columns)) * query.dtype.itemsize

    def costs(kernel: str) -> dict[str, int] | None:
        matmuls = next((n for part, n in _MATMULS.items() if part in f"{kernel}_"), None)
        if matmuls is None:
            return None
        flops = 2 * matmuls * scores * size
        return {"flops": flops, "transcendentals": scores, "bytes_accessed": moved}

    annotate_kernel_costs(b, result, costs)


def _tiles(rows: int, columns: int, mask: Mask) -> int:
    """How many tiles there are, without those of which a mask leaves nothing."""
    height, width = _tile(rows), _tile(columns)
    if isinstance(mask, Pattern):
        tiles = mask.seen.reshape(rows // height, height, columns // width, width)
        return int(tiles.any((1, 3)).sum())
    if not mask:
        return rows // height * (columns // width)
    ends = range(height, rows + 1, height)
    return sum(min(-(-end // width), columns // width) for end in ends)


@functools.cache
def _kernel() -> Any:
    """JAX's module, or None if it lacks what is used here.

    The gradient from a logarithm that was kept is a private function: the public one computes the
    result once more for it.
    """
    names = ("make_splash_mha", "BlockSizes", "_splash_attention_bwd")
    package = "jax.experimental.pallas.ops.tpu.splash_attention"
    return find_module(f"{package}.splash_attention_kernel", *names)


def splash_attention(
    query: Array, key: Array, value: Array, *, mask: Mask, precision: str
) -> tuple[Array, Array]:
    """For JAX: the result, and the logarithm of each row's sum."""
    import jax

    # Mosaic has no 64-bit integers, not even for indices.
    with jax.enable_x64(False), jax.default_matmul_precision(precision):
        kernel = _made(query.shape[1], query.shape[2], key.shape[2], mask)
        result, (logsumexp,) = jax.vmap(kernel)(query, key, value)
    return result, logsumexp


def splash_attention_backward(
    grad: Array,
    query: Array,
    key: Array,
    value: Array,
    result: Array,
    logsumexp: Array,
    *,
    mask: Mask,
    precision: str,
) -> tuple[Array, ...]:
    """For JAX: the gradients of query, key and value."""
    import jax

    with jax.enable_x64(False), jax.default_matmul_precision(precision):
        kernel = _made(query.shape[1], query.shape[2], key.shape[2], mask)
        settings = {**kernel.kwargs, "save_residuals": False}

        infos = (kernel.dq_mask_info, kernel.dkv_mask_info)

        def of_one(
            q: Array, k: Array, v: Array, out: Array, sums: Array, above: Array
        ) -> tuple[Array, ...]:
            kept = (q, k, v, None, None, out, sums, *infos)
            return _kernel()._splash_attention_bwd(res=kept, do=above, **settings)[3:6]

        return tuple(jax.vmap(of_one)(query, key, value, result, logsumexp, grad))


def _made(heads: int, rows: int, columns: int, mask: Mask) -> Any:
    """The kernel for one sample."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    if isinstance(mask, Pattern):
        of_head: Any = _hashed(masks.NumpyMask, mask)
    else:
        of_head = (masks.CausalMask if mask else masks.FullMask)((rows, columns))
    q, kv = _tile(rows), _tile(columns)
    sizes = _kernel().BlockSizes(
        block_q=q,
        block_kv=kv,
        block_q_dkv=q,
        block_kv_dkv=kv,
        block_q_dq=q,
        block_kv_dq=kv,
    )
    return _kernel().make_splash_mha(
        masks.MultiHeadMask([of_head] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        save_residuals=True,
    )


def _hashed(kind: Any, mask: Pattern) -> Any:
    """A JAX mask that is hashed by its digest: its own hash reads all elements, and is computed for
    each head."""
    hashed = type("Known", (kind,), {"__hash__": lambda _: hash(mask.digest)})
    return hashed(mask.seen)


def _tile(length: int) -> int:
    return tile(length, _TILE)
