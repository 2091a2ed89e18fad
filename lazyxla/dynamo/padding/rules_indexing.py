"""Rules of operators that look elements up, and of those that write or add them by index.

Indices in padding are 0 first, so that they are valid. An index of true elements is below the true
size of what it indexes, where that is padded; a negative one counts from the true end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from lazyxla.dynamo.padding import structure
from lazyxla.dynamo.padding.rules import Arguments, Call, rule
from lazyxla.dynamo.padding.structure import Dim, NotPaddableError, Structure

if TYPE_CHECKING:
    from lazyxla.dynamo.padding.rewriting import Writer

aten = torch.ops.aten


def _aligned(call: Call, given: Structure, index: Structure, dim: int) -> None:
    """Requires that all dimensions but one are padded alike."""
    if given:
        call.require_whole(given[dim])
    for d, (ours, theirs) in enumerate(zip(given, index, strict=True)):
        if d != dim:
            call.require_same([ours], [theirs])


@rule(aten.gather.default)
def _gather(call: Call) -> Structure:
    index = call.of("index")
    if index:
        _aligned(call, call.of("self"), index, call["dim"] % len(index))
    call.fill("index", 0)
    return index


@rule(aten.scatter_add.default)
def _scatter_add(call: Call) -> Structure:
    given, index = call.of("self"), call.of("index")
    if given:
        _aligned(call, given, index, call["dim"] % len(given))
    call.require_same(index, call.of("src"))
    for name in ("index", "src"):
        call.fill(name, 0)
    return given


@rule(aten.scatter.value, aten.scatter.src)
def _scatter(call: Call) -> Structure:
    given, index = call.of("self"), call.of("index")
    dim = call["dim"] % max(len(given), 1)
    if given:
        _aligned(call, given, index, dim)
    if "src" in call.arguments:
        call.require_same(index, call.of("src"))
    if not (given and call.is_padded(index[dim])):
        call.fill("index", 0)
        return given
    # Padding must be written to padding: if there is any, the last position is padding.
    call.require_same(given[dim : dim + 1], index[dim : dim + 1])
    target: Any = call.node.target
    size = structure.product(given[dim])

    def rewrite(w: Writer, args: Arguments) -> Any:
        places = w.fill(args["index"], index, w.size(size) - 1, [dim])
        places = w.fill(places, index, 0, [d for d in range(len(index)) if d != dim])
        value = args["src"] if "src" in args else args["value"]
        return w.emit(target, args["self"], dim, places, value)

    call.rewrite(rewrite)
    return given


@rule(aten.index_select.default)
def _index_select(call: Call) -> Structure:
    given = call.of("self")
    if not given:
        raise NotPaddableError("selects of a tensor without dimensions")
    dim = call["dim"] % len(given)
    call.require_whole(given[dim])
    call.fill("index", 0)
    index = call.of("index") or ((),)
    return (*given[:dim], *index, *given[dim + 1 :])


@rule(aten.index_add.default)
def _index_add(call: Call) -> Structure:
    given, source = call.of("self"), call.of("source")
    if not given:
        raise NotPaddableError("adds to a tensor without dimensions")
    dim = call["dim"] % len(given)
    _aligned(call, given, source, dim)
    call.require_same(source[dim : dim + 1], call.of("index"))
    call.fill("index", 0)
    call.fill("source", 0)
    return given


# --- x[i, :, j] ----------------------------------------------------------------------------------


def _indexed(call: Call) -> tuple[Structure, list[int], Structure, int]:
    """Of an indexing call: the operand, its indexed dimensions, the structure of the indices'
    elements, and where their dimensions are in the result."""
    given = call.of("self")
    indices = call["indices"]
    dims = [d for d, index in enumerate(indices) if index is not None]
    for d in dims:
        if indices[d].meta["val"].dtype in (torch.bool, torch.uint8):
            raise NotPaddableError("selects by a mask")
        call.require_whole(given[d])
    each = structure.broadcast([call.of_node(indices[d]) for d in dims], call.padded)
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    return given, dims, each, dims[0] if adjacent else 0


def _safe(call: Call, w: Writer, indices: list[Any], given: Structure) -> list[Any]:
    """Indices that are valid everywhere, those from the end counted from the true one."""
    safe = []
    for original, index, dim in zip(call["indices"], indices, given, strict=False):
        if index is not None:
            index = w.fill(index, call.of_node(original), 0)
            if call.is_padded(dim):
                index = _from_true_end(w, index, dim)
        safe.append(index)
    return safe


def _from_true_end(w: Writer, index: fx.Node, dim: Dim) -> Any:
    size = w.number(structure.product(dim), index.meta["val"].dtype)
    from_end = w.emit(aten.add.Tensor, index, size)
    return w.emit(aten.where.self, w.emit(aten.lt.Scalar, index, 0), from_end, index)


def _element_dims(given: Structure, dims: list[int], each: Structure, place: int) -> Structure:
    rest = [dim for d, dim in enumerate(given) if d not in dims]
    return (*rest[:place], *each, *rest[place:])


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(call: Call) -> Structure:
    given, dims, each, place = _indexed(call)
    target: Any = call.node.target

    def rewrite(w: Writer, args: Arguments) -> Any:
        return w.emit(target, args["self"], _safe(call, w, args["indices"], given))

    call.rewrite(rewrite)
    return _element_dims(given, dims, each, place)


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(call: Call) -> Structure:
    given, dims, each, place = _indexed(call)
    target: Any = call.node.target
    elements = _element_dims(given, dims, each, place)
    values = structure.broadcast([elements, call.of("values")], call.padded)
    call.require_same(values, elements)
    accumulate = bool(call.get("accumulate", False))
    if call.is_padded(*each) and not accumulate:
        raise NotPaddableError("writes by as many indices as a size that varies")
    shape = [structure.product(dim) for dim in elements]

    def rewrite(w: Writer, args: Arguments) -> Any:
        added = args["values"]
        if accumulate:
            added = w.emit(aten.expand.default, added, w.size(shape))
            added = w.fill(added, elements, 0)
        indices = _safe(call, w, args["indices"], given)
        return w.emit(target, args["self"], indices, added, accumulate)

    call.rewrite(rewrite)
    return given
