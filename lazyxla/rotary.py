"""Rotary position embedding: on TPUs one kernel, which also moves heads to the front.

XLA's compiler for TPUs computes the usual formula, x * cos + rotate_half(x) * sin, in several
passes: it writes the rotated halves, and, as attention wants heads before tokens, copies of both
orders of dimensions. benchmarks/compiled_kernels.py shows by how much.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lazyxla import untraced
from lazyxla.jax.kernels import gradients_of, kernel

_LANES = 128
"""The width of a register: heads that are narrower share one."""

_LEAST_TOKENS = 128
"""With fewer tokens, as in decoding, XLA's own fusions are small and a kernel only separates
them."""

_TOKENS_PER_BLOCK = 256
_LANES_PER_BLOCK = 8 * _LANES  # a block of 256 tokens in float32 is 1 of 16 MiB that a kernel has


@untraced.traced
def rotary_embedding(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotates each pair (i, i + size / 2) of queries' and keys' numbers by its token's angle::

        x * cos + torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1) * sin

    `size` is the head dimension. On TPUs it is one kernel each for queries and keys, which reads
    them as a matmul writes them, [batch, tokens, heads, size], and writes them heads first, as
    attention reads them. It may take the place of ``apply_rotary_pos_emb`` in transformers' models.
    It computes in float32 for narrower dtypes.

    Args:
        query: [batch, heads, tokens, size], or with `unsqueeze_dim` 2 [batch, tokens, heads, size].
        key: the same for its own number of heads.
        cos: of the angles: [batch, tokens, size], [1, tokens, size] or [tokens, size].
        sin: the same.
        unsqueeze_dim: the dimension of the heads: 1 or 2.

    Returns:
        Query and key, of the same shapes; the dtype is PyTorch's promotion of theirs and that of
        `cos`. In memory heads are before tokens.

    Raises:
        ValueError: shapes do not fit each other, the size is odd, or there is no such dimension.
    """
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"heads are dimension 1 or 2, not {unsqueeze_dim}")
    cos, sin = (x.unsqueeze(0) if x.dim() == 2 else x for x in (cos, sin))
    query, key = (x if unsqueeze_dim == 1 else x.transpose(1, 2) for x in (query, key))
    _check(query, cos, sin)
    _check(key, cos, sin)
    query, key = _turned(query, cos, sin), _turned(key, cos, sin)
    if unsqueeze_dim == 1:
        return query, key
    return query.transpose(1, 2), key.transpose(1, 2)


@untraced.traced
def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads first, of the same; x is read in the order that it has in memory."""
    turn: Any = _turn
    by_tokens = x.stride(1) < x.stride(2)
    found: Tensor = turn(x.transpose(1, 2) if by_tokens else x, cos, sin, by_tokens, False, False)
    return found


def _reference(
    x: Tensor, cos: Tensor, sin: Tensor, from_tokens: bool, to_tokens: bool, inverse: bool
) -> Tensor:
    """Tokens are before heads in x, or in the result; the inverse rotates back (the transpose of
    the same matrix, for its gradient)."""
    dtype = torch.promote_types(x.dtype, cos.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    heads = 2 if from_tokens else 1
    x, cos, sin = x.to(wide), cos.to(wide).unsqueeze(heads), sin.to(wide).unsqueeze(heads)
    first, second = (x * sin if inverse else x).chunk(2, -1)
    if inverse:
        turned = x * cos + torch.cat((second, -first), -1)
    else:
        turned = x * cos + torch.cat((-second, first), -1) * sin
    turned = turned if from_tokens == to_tokens else turned.transpose(1, 2)
    return turned.to(dtype).contiguous()


def _backward(inputs: Any, outputs: Any, gradients: Any) -> Any:
    x, cos, sin, from_tokens, to_tokens, inverse = inputs
    if cos.requires_grad or sin.requires_grad:  # which is rare
        return gradients_of(_reference, inputs, outputs, gradients)
    (gradient,) = gradients
    turn: Any = _turn
    found = turn(gradient, cos, sin, to_tokens, from_tokens, not inverse)
    return found.to(x.dtype), None, None, None, None, None


def _kernel(
    x: Any,
    cos: Any,
    sin: Any,
    from_tokens: bool,
    to_tokens: bool,
    inverse: bool,
    *,
    interpret: bool = False,
) -> Any:
    import jax.numpy as jnp

    batch, heads, tokens, size = x.shape
    if from_tokens:
        heads, tokens = tokens, heads
        # As the matmul wrote it: nothing is moved.
        x = x.reshape(batch, tokens, heads * size)
    dtype = jnp.promote_types(x.dtype, cos.dtype)
    found = _call(x, cos, sin, (batch, heads, tokens, size), to_tokens, inverse, dtype, interpret)
    return found.reshape(batch, tokens, heads, size) if to_tokens else found


def _suits(
    x: Tensor, cos: Tensor, sin: Tensor, from_tokens: bool, to_tokens: bool, inverse: bool
) -> bool:
    batch, heads, tokens, size = x.shape
    if from_tokens:
        heads, tokens = tokens, heads
    shared = size in (32, 64) and heads % (_LANES // size) == 0
    fits = shared or (size > 0 and size % _LANES == 0)
    known = all(a.dtype in (torch.bfloat16, torch.float32) for a in (x, cos, sin))
    return known and fits and tokens >= _LEAST_TOKENS and batch > 0


def _call(
    x: Any,
    cos: Any,
    sin: Any,
    shape: tuple[int, int, int, int],
    to_tokens: bool,
    inverse: bool,
    dtype: Any,
    interpret: bool,
) -> Any:
    """The kernel, over blocks of some tokens' numbers for some heads. Where tokens are first, a
    token's heads are adjacent: [batch, tokens, heads * size]."""
    import jax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    batch, heads, tokens, size = shape
    rows, columns = min(_TOKENS_PER_BLOCK, tokens), _heads_per_block(heads, size)
    by_tokens = pl.BlockSpec((1, rows, columns * size), lambda b, t, h: (b, t, h))
    by_heads = pl.BlockSpec((1, columns, rows, size), lambda b, t, h: (b, h, t, 0))
    is_shared = len(cos) == 1
    table = pl.BlockSpec((1, rows, size), lambda b, t, h: (0 if is_shared else b, t, 0))
    flat = (batch, tokens, heads * size)
    bytes_accessed = sum(a.size * a.dtype.itemsize for a in (x, cos, sin)) + x.size * dtype.itemsize
    cost = pl.CostEstimate(flops=3 * x.size, transcendentals=0, bytes_accessed=bytes_accessed)
    return pl.pallas_call(
        _body(columns, size, x.ndim == 3, to_tokens, inverse),
        name="rotary_embedding",
        grid=(batch, pl.cdiv(tokens, rows), heads // columns),
        in_specs=[by_tokens if x.ndim == 3 else by_heads, table, table],
        out_specs=by_tokens if to_tokens else by_heads,
        out_shape=jax.ShapeDtypeStruct(flat if to_tokens else shape, dtype),
        # Heads last: the angles of some tokens are read once for all of them.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=cost,
        interpret=interpret,
    )(x, cos, sin)


def _heads_per_block(heads: int, size: int) -> int:
    """At most as many as fill a block's lanes, in whole registers."""
    together = max(_LANES // size, 1)
    most = max(_LANES_PER_BLOCK // size, together)
    return together * max(n for n in range(1, most // together + 1) if heads // together % n == 0)


def _body(columns: int, size: int, from_tokens: bool, to_tokens: bool, inverse: bool) -> Any:
    """The kernel's body for a block: one register's width after the other."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas import tpu as pltpu

    together = max(_LANES // size, 1)
    width, half = together * size, size // 2

    def swapped(x: Any) -> Any:
        """Swaps the halves of each head."""
        if together == 1:
            return pltpu.roll(x, half, 1)
        lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        ahead, behind = pltpu.roll(x, width - half, 1), pltpu.roll(x, half, 1)
        return jnp.where(lane % size < half, ahead, behind)

    def wide(table: Any) -> Any:
        return jnp.concatenate([table[0].astype(jnp.float32)] * together, 1)

    def body(x_ref: Any, cos_ref: Any, sin_ref: Any, out_ref: Any) -> None:
        cos, sin = wide(cos_ref), wide(sin_ref)
        lane = jax.lax.broadcasted_iota(jnp.int32, sin.shape, 1)
        sin = jnp.where(lane % size < half, -sin, sin)
        for first in range(0, columns, together):
            heads = range(first, first + together)
            lanes = slice(first * size, first * size + width)
            if from_tokens:
                x = x_ref[0, :, lanes].astype(jnp.float32)
            else:
                x = jnp.concatenate([x_ref[0, h].astype(jnp.float32) for h in heads], 1)
            turned = x * cos + (swapped(x * sin) if inverse else swapped(x) * sin)
            turned = turned.astype(out_ref.dtype)
            if to_tokens:
                out_ref[0, :, lanes] = turned
                continue
            for place, head in enumerate(heads):
                out_ref[0, head] = turned[:, place * size : (place + 1) * size]

    return body


_STATIC = ("from_tokens", "to_tokens", "inverse")
_turn = kernel(
    "lazyxla::rotary_embedding", _reference, static=_STATIC, suits=_suits, backward=_backward
)(_kernel)


@untraced.traced
def _check(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """`x` is [batch, heads, tokens, size] here."""
    if x.dim() != 4 or x.shape[3] % 2:
        raise ValueError(
            "expected query and key of four dimensions, the last one's size even, got "
            f"{tuple(x.shape)}"
        )
    batch, _, tokens, size = x.shape
    known = [(batch, tokens, size), (1, tokens, size)]
    if cos.shape != sin.shape or tuple(cos.shape) not in known:
        raise ValueError(
            f"expected cos and sin of [batch or 1, {tokens}, {size}] for {tuple(x.shape)}, got "
            f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        )
