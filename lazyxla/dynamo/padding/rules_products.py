"""Rules of matmuls and of attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.dynamo.padding import structure
from lazyxla.dynamo.padding.rules import Arguments, Call, Results, rule
from lazyxla.dynamo.padding.structure import NotPaddableError, Structure

if TYPE_CHECKING:
    from lazyxla.dynamo.padding.rewriting import Writer

aten = torch.ops.aten


def _product(left: str, right: str, batches: int, added: str = "") -> Callable[[Call], Results]:
    """A contraction of the left operand's last dimension: of vectors, matrices or batches of
    them."""

    def apply(call: Call) -> Structure:
        ours, theirs = call.of(left), call.of(right)
        call.require_same(ours[:batches], theirs[:batches])
        call.require_same(ours[-1:], theirs[batches : batches + 1])
        for name, dim in ((left, len(ours) - 1), (right, batches)):
            call.fill(name, 0, [dim])
        batch = structure.broadcast([ours[:batches], theirs[:batches]], call.padded)
        result = (*batch, *ours[batches:-1], *theirs[batches + 1 :])
        if added:
            whole = structure.broadcast([result, call.of(added)], call.padded)
            call.require_same(whole, result)
        return result

    return apply


rule(aten.mm.default)(_product("self", "mat2", 0))
rule(aten.bmm.default)(_product("self", "mat2", 1))
rule(aten.mv.default)(_product("self", "vec", 0))
rule(aten.dot.default)(_product("self", "tensor", 0))
rule(aten.addmm.default)(_product("mat1", "mat2", 0, "self"))
rule(aten.addmv.default)(_product("mat", "vec", 0, "self"))
rule(aten.baddbmm.default)(_product("batch1", "batch2", 1, "self"))


# --- Attention: queries (N, H, S, D), keys and values (N, H, T, D) -------------------------------


def _attend(call: Call) -> tuple[Structure, Structure]:
    """Structures of queries and keys. Notes that padding among the keys gets no weight."""
    query, key = call.of("query"), call.of("key")
    call.require_same(key, call.of("value"))
    call.require_same(query[:1], key[:1])
    for dims in (query, key):
        if call.is_padded(dims[1], dims[3]):
            raise NotPaddableError("attends with heads whose size varies")
        call.require_whole(dims[2])
    causal = bool(call.get("is_causal", False))
    if causal and query[2] != key[2] and call.is_padded(query[2], key[2]):
        raise NotPaddableError("is causal between sequences of different sizes")
    for name in ("key", "value"):
        call.fill(name, 0, [2])
    mask = call["attn_mask"]
    shape = call.of("attn_mask") if mask is not None else ()
    if shape:
        expected = (query[0], query[1], query[2], key[2])[4 - len(shape) :]
        for ours, theirs in zip(shape, expected, strict=True):
            if ours:
                call.require_same([ours], [theirs])
    if call.is_padded(key[2]) and not (causal and mask is None):
        dtype = call.dtype("query") if mask is None else call.dtype("attn_mask")
        if mask is not None and shape and shape[-1]:
            hidden = 0 if dtype == torch.bool else -math.inf
            call.fill("attn_mask", hidden, [len(shape) - 1])
        else:
            _add_mask(call, key, query, dtype)
    return query, key


def _add_mask(call: Call, key: Structure, query: Structure, dtype: torch.dtype) -> None:
    """Notes a mask that hides padding from all queries, over the one that is there."""
    target: Any = call.node.target

    def rewrite(w: Writer, args: Arguments) -> Any:
        pads = w.padding(((), (), (), key[2]), [3])
        mask = args["attn_mask"]
        if mask is not None:
            if dtype == torch.bool:
                seen = w.emit(aten.logical_not.default, pads)
                mask = w.emit(aten.logical_and.default, mask, seen)
            else:
                mask = w.emit(aten.where.ScalarSelf, pads, -math.inf, mask)
        else:
            columns = w.size([structure.product(key[2])])
            zeros = w.emit(aten.zeros.default, columns, dtype=dtype, device=w.device)
            mask = w.emit(aten.masked_fill.Scalar, zeros, pads, -math.inf)
            shape = [1, 1, w.size(structure.product(query[2])), *columns]
            mask = w.emit(aten.expand.default, mask, shape)
        given = {**args, "attn_mask": mask}
        schema = target._schema.arguments
        listed = [given[a.name] for a in schema if not a.kwarg_only]
        named = {a.name: given[a.name] for a in schema if a.kwarg_only}
        return w.emit(target, *listed, **named)

    call.rewrite(rewrite)


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _attention(call: Call) -> Results:
    query, _ = _attend(call)
    return [query, query[:3]]


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _attention_backward(call: Call) -> Results:
    query, key = _attend(call)
    for name in ("grad_out", "query", "out", "logsumexp"):
        call.fill(name, 0, [2])
    if call["attn_mask"] is not None and (rank := len(call.of("attn_mask"))) > 1:
        call.fill("attn_mask", 0, [rank - 2])
    return [query, key, key]
