"""Attention over a cache in pages, as servers of language models have it."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lazyxla import untraced
from lazyxla.jax.kernels import kernel

_PAGES_PER_BLOCK = 16
_QUERIES_PER_BLOCK = 32
_VMEM_BYTES = 64 << 20


class _Inputs(NamedTuple):
    """As in :func:`ragged_paged_attention`. JAX arrays in the kernel."""

    query: Any
    kv_pages: Any
    kv_lengths: Any
    page_indices: Any
    query_starts: Any
    num_sequences: Any


@untraced.traced
def ragged_paged_attention(
    query: Tensor,
    kv_pages: Tensor,
    kv_lengths: Tensor,
    page_indices: Tensor,
    query_starts: Tensor,
    num_sequences: Tensor,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Causal attention of the new tokens of several sequences to all their tokens so far.

    Sequences that have just begun, with many new tokens, and those that continue, with one each,
    may be mixed. Sizes stay the same while the numbers of sequences and tokens vary, so that
    nothing is compiled anew. On TPUs it is JAX's kernel (``jax.experimental.pallas.ops.tpu``),
    which reads the pages that are needed only; elsewhere the pages of each token's sequence are
    gathered. It has no gradient.

    Args:
        query: queries of the new tokens of all sequences, one sequence after the other:
            [tokens, heads, head dimension]. Tokens after the last sequence's are ignored.
        kv_pages: the cache: [pages, tokens of a page, 2 x key/value heads, head dimension]. The key
            and the value of a head follow each other.
        kv_lengths: int32, [sequences]: the tokens that each has in the cache, the new ones
            included.
        page_indices: int32, [sequences, pages of a sequence]: where its pages are, in order.
        query_starts: int32, [sequences + 1]: the first of each sequence's new tokens, and the end.
        num_sequences: int32, [1]: how many there are; what the others have is ignored.
        scale: what the scores are multiplied by; by default 1 / sqrt(head dimension).
        sliding_window: how many tokens back a token sees, itself included; None: all.
        soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``.

    Returns:
        [tokens, heads, head dimension], of the query's dtype. For ignored tokens it is zeros, on
        TPUs anything.

    Raises:
        ValueError: shapes do not fit each other.
        TypeError: lengths, indices, starts or the number are not int32.
    """
    inputs = _Inputs(query, kv_pages, kv_lengths, page_indices, query_starts, num_sequences)
    _check(inputs)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    attend: Any = _attend
    found: Tensor = attend(list(inputs), scale, sliding_window, soft_cap)
    return found


def _reference(
    inputs: list[Tensor], scale: float, sliding_window: int | None, soft_cap: float | None
) -> Tensor:
    query, kv_pages, kv_lengths, page_indices, query_starts, num_sequences = inputs
    tokens, heads, _ = query.shape
    groups = kv_pages.shape[2] // 2
    token = torch.arange(tokens, device=query.device)
    sequences = torch.arange(len(kv_lengths), device=query.device)
    ends_before = (query_starts[1:] <= token[:, None]) & (sequences < num_sequences)
    sequence = ends_before.sum(1)
    is_there = sequence < num_sequences
    sequence = sequence.clamp(max=len(kv_lengths) - 1)
    length, end = kv_lengths[sequence], query_starts[sequence + 1]
    place = length - end + token  # in its sequence
    pages = kv_pages[page_indices.long()].flatten(1, 2)[sequence]
    key, value = pages[:, :, 0::2], pages[:, :, 1::2]  # [tokens, rows, groups, size]
    grouped = query.unflatten(1, (groups, heads // groups))
    scores = torch.einsum("tghd,tkgd->tghk", grouped.float(), key.float()) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    row = torch.arange(pages.shape[1], device=query.device)
    seen = row <= place[:, None]
    if sliding_window is not None:
        seen = seen & (row > place[:, None] - sliding_window)
    seen = seen & is_there[:, None]
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)  # of ignored tokens
    found = torch.einsum("tghk,tkgd->tghd", weights, value.float())
    return found.flatten(1, 2).to(query.dtype)


@kernel(
    "lazyxla::ragged_paged_attention",
    _reference,
    static=("scale", "sliding_window", "soft_cap"),
)
def _attend(inputs: Any, scale: float, sliding_window: int | None, soft_cap: float | None) -> Any:
    name = "jax.experimental.pallas.ops.tpu.ragged_paged_attention"
    attention: Any = importlib.import_module(name).ragged_paged_attention
    given = _Inputs(*inputs)
    return attention(
        *given,
        sm_scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        # Given, for JAX would ask its devices what is best for them.
        num_kv_pages_per_block=min(_PAGES_PER_BLOCK, given.page_indices.shape[1]),
        num_queries_per_block=min(_QUERIES_PER_BLOCK, given.query.shape[0]),
        vmem_limit_bytes=_VMEM_BYTES,
    )


@untraced.traced
def _check(inputs: _Inputs) -> None:
    query, kv_pages, kv_lengths, page_indices, query_starts, num_sequences = inputs
    if query.dim() != 3 or kv_pages.dim() != 4 or query.shape[2] != kv_pages.shape[3]:
        raise ValueError(
            "expected query [tokens, heads, size] and kv_pages [pages, rows, 2 * groups, size], "
            f"got {tuple(query.shape)} and {tuple(kv_pages.shape)}"
        )
    heads, parts = query.shape[1], kv_pages.shape[2]
    if parts % 2 or heads % (parts // 2):
        raise ValueError(f"{heads} heads do not divide into groups of {parts} keys and values")
    sequences = kv_lengths.shape[0] if kv_lengths.dim() == 1 else -1
    shapes = (page_indices.dim(), page_indices.shape[0], tuple(query_starts.shape))
    if shapes != (2, sequences, (sequences + 1,)) or tuple(num_sequences.shape) != (1,):
        raise ValueError(
            "expected kv_lengths [n], page_indices [n, pages], query_starts [n + 1] and "
            f"num_sequences [1], got {tuple(kv_lengths.shape)}, {tuple(page_indices.shape)}, "
            f"{tuple(query_starts.shape)} and {tuple(num_sequences.shape)}"
        )
    for x in inputs[2:]:
        if x.dtype != torch.int32:
            raise TypeError(f"lengths, indices, starts and the number are int32, got {x.dtype}")
