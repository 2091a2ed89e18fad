"""Rules of operators that move elements: views, parts, concatenations and their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from lazyxla.dynamo.padding import structure
from lazyxla.dynamo.padding.rules import Arguments, Call, constant, rule
from lazyxla.dynamo.padding.structure import Dim, NotPaddableError, Structure

if TYPE_CHECKING:
    from lazyxla.dynamo.padding.rewriting import Writer

aten = torch.ops.aten


@rule(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    sizes=("size", "shape"),
)
def _view(call: Call) -> Structure:
    return structure.view(call.of("self"), call.result.shape, call.padded)


@rule(aten.permute.default)
def _permute(call: Call) -> Structure:
    given = call.of("self")
    return tuple(given[d] for d in call.dims("dims", len(given)))


@rule(aten.transpose.int, aten.t.default)
def _transpose(call: Call) -> Structure:
    given = list(call.of("self"))
    if len(given) > 1:
        i, j = call.get("dim0", 0), call.get("dim1", 1)
        given[i], given[j] = given[j], given[i]
    return tuple(given)


@rule(aten.unsqueeze.default)
def _unsqueeze(call: Call) -> Structure:
    given = list(call.of("self"))
    given.insert(call["dim"] % (len(given) + 1), ())
    return tuple(given)


@rule(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def _squeeze(call: Call) -> Structure:
    given = call.of("self")
    dims = call.dims("dim", len(given))
    return tuple(dim for i, dim in enumerate(given) if i not in dims or dim)


@rule(aten.diagonal.default)
def _constant_diagonal(call: Call) -> Structure:
    given = call.of("self")
    pair = [d % len(given) for d in (call["dim1"], call["dim2"])]
    if call.padded_dims(given, pair):
        raise NotPaddableError("takes elements across padding")
    return (*(d for i, d in enumerate(given) if i not in pair), constant(call.result)[-1])


# --- One position of a dimension -----------------------------------------------------------------


def _position(call: Call, dim: Dim) -> Any:
    """A position as an expression of true sizes; None if padding changes nothing."""
    index = call["index"]
    if not call.is_padded(dim) and not call.has_symbol(index):
        return None
    if len(dim) > 1:
        raise NotPaddableError("takes a position of a flattened dimension")
    if isinstance(index, int):
        return None if index >= 0 else structure.product(dim) + index
    if not getattr(index, "is_nonnegative", False):
        raise NotPaddableError("takes a position that may be negative")
    return index


@rule(aten.select.int, sizes=("index",))
def _select(call: Call) -> Structure:
    given = call.of("self")
    dim = call["dim"] % len(given)
    position = _position(call, given[dim])
    if position is not None:

        def rewrite(w: Writer, args: Arguments) -> Any:
            index = w.emit(aten.unsqueeze.default, w.number(position), 0)
            part = w.emit(aten.index_select.default, args["self"], dim, index)
            return w.emit(aten.squeeze.dim, part, dim)

        call.rewrite(rewrite)
    return structure.reduced(given, [dim], False)


@rule(aten.select_backward.default, sizes=("input_sizes", "index"))
def _select_backward(call: Call) -> Structure:
    rank = len(call["input_sizes"])
    dim = call["dim"] % rank
    gradient = call.of("grad_output")
    (own,) = structure.of_shape([call.result.shape[dim]])
    position = _position(call, own)
    size = call["input_sizes"][dim]
    if position is not None:

        def rewrite(w: Writer, args: Arguments) -> Any:
            shape = [1] * rank
            shape[dim] = -1
            there = w.emit(aten.eq.Tensor, w.arange(w.size(size)), w.number(position))
            there = w.emit(aten.view.default, there, shape)
            spread = w.emit(aten.unsqueeze.default, args["grad_output"], dim)
            return w.emit(aten.where.ScalarOther, there, spread, 0)

        call.rewrite(rewrite)
    return (*gradient[:dim], own, *gradient[dim:])


# --- Parts ---------------------------------------------------------------------------------------


def _part(call: Call, whole: Dim, start: Any, size: Any) -> Dim:
    """The dimension that is a contiguous part of another one."""
    expr = structure.expression(size)
    if not call.is_padded(whole):
        if call.has_symbol([expr, start]):
            raise NotPaddableError("takes a part whose size varies of a dimension")
        return () if expr == 1 else (expr,)
    if expr == structure.product(whole):
        return whole
    if len(whole) > 1:
        raise NotPaddableError("takes a part of a flattened dimension")
    # PyTorch knows the part's size, so one that is counted from the end begins within.
    given = call.get("start", 0)
    counts = isinstance(given, int) or given.is_nonnegative
    if call.has_symbol(start) and (call.has_symbol(expr) or not counts):
        raise NotPaddableError("takes a part from a position that varies")
    return structure.of_size(size) if expr != 1 else ()


def _places(w: Writer, start: Any, size: int) -> Any:
    """Positions from one that varies on."""
    return w.emit(aten.add.Tensor, w.arange(size), w.number(start))


def _start(call: Call, size: Any) -> Any:
    """Where a slice begins; its end and step do not matter then."""
    start = call.get("start", 0)
    if call.get("step", 1) != 1:
        raise NotPaddableError("takes every other element")
    if isinstance(start, int) and start < 0:
        return structure.expression(size) + start
    return start


@rule(aten.slice.Tensor, sizes=("start", "end"))
def _slice(call: Call) -> Structure:
    given = list(call.of("self"))
    dim = call["dim"] % len(given)
    if not call.is_padded(given[dim]):
        if call.has_symbol([call["start"], call["end"]]):
            raise NotPaddableError("takes a part whose size varies of a dimension")
        given[dim] = constant(call.result)[dim]
        return tuple(given)
    source: Any = call["self"].meta["val"].shape[dim]
    start = _start(call, source)
    size = call.result.shape[dim]
    given[dim] = _part(call, given[dim], start, size)
    expr = structure.expression(size)
    if given[dim] != call.of("self")[dim]:

        def rewrite(w: Writer, args: Arguments) -> Any:
            if call.has_symbol(start):
                places = _places(w, start, w.size(expr))
                return w.emit(aten.index_select.default, args["self"], dim, places)
            begin = w.size(start)
            return w.emit(aten.slice.Tensor, args["self"], dim, begin, begin + w.size(expr))

        call.rewrite(rewrite)
    return tuple(given)


@rule(aten.slice_backward.default, sizes=("input_sizes", "start", "end"))
def _slice_backward(call: Call) -> Structure:
    given = list(call.of("grad_output"))
    dim = call["dim"] % len(given)
    size = call.result.shape[dim]
    if not call.has_symbol(structure.expression(size)):
        if call.has_symbol([call["start"], call["end"]]) or call.is_padded(given[dim]):
            raise NotPaddableError("takes a part whose size varies of a dimension")
        given[dim] = constant(call.result)[dim]
        return tuple(given)
    start = _start(call, size)
    (whole,) = structure.of_shape([size])
    part = call["grad_output"].meta["val"].shape[dim]
    given[dim] = whole if given[dim] == whole else given[dim]
    if given[dim] != _part(call, whole, start, part):
        raise NotPaddableError("regroups elements")
    call.fill("grad_output", 0, [dim])
    total, kept = structure.expression(size), structure.expression(part)

    def rewrite(w: Writer, args: Arguments) -> Any:
        if call.has_symbol(start):
            return _spread(w, args["grad_output"], dim, start, w.size(total))
        begin = w.size(start)
        after = w.size(total) - begin - w.size(kept)
        pads = [0] * (2 * (len(given) - 1 - dim)) + [begin, after]
        return w.emit(aten.constant_pad_nd.default, args["grad_output"], pads)

    call.rewrite(rewrite)
    given[dim] = whole
    return tuple(given)


def _spread(w: Writer, part: fx.Node, dim: int, start: Any, size: int) -> Any:
    """A tensor that is a part from a position that varies on, and 0 elsewhere."""
    rank, count = len(part.meta["val"].shape), part.meta["val"].shape[dim]
    shape = [1] * rank
    shape[dim] = -1
    places = w.emit(aten.sub.Tensor, w.arange(size), w.number(start))
    inside = w.emit(aten.clamp.default, places, 0, count - 1)
    there = w.emit(aten.view.default, w.emit(aten.eq.Tensor, places, inside), shape)
    values = w.emit(aten.index_select.default, part, dim, inside)
    return w.emit(aten.where.ScalarOther, there, values, 0)


@rule(aten.constant_pad_nd.default)
def _pad(call: Call) -> Structure:
    given = list(call.of("self"))
    for dim, size in enumerate(call.result.shape):
        position = 2 * (len(given) - 1 - dim)
        if not any(call["pad"][position : position + 2]):
            continue
        if call.is_padded(given[dim]):
            raise NotPaddableError("adds elements after padding")
        given[dim] = structure.of_size(size)
    return tuple(given)


@rule(
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.chunk.default,
)
def _split(call: Call) -> list[Structure | None]:
    given = call.of("self")
    dim = call.get("dim", 0) % len(given)
    if call.is_padded(given[dim]):
        raise NotPaddableError("divides a dimension whose size varies")
    rest = [d for i, d in enumerate(given) if i != dim]
    results: list[Structure | None] = []
    for part in call.result:
        own = constant(part)[dim : dim + 1] if part.dim() == len(given) else ()
        results.append((*rest[:dim], *own, *rest[dim:]))
    return results


@rule(aten.cat.default)
def _cat(call: Call) -> Structure:
    """Along a padded dimension only the last tensor may have padding."""
    parts = [call.of_node(node) for node in call["tensors"]]
    parts = [p for p, n in zip(parts, call["tensors"], strict=True) if n.meta["val"].dim() > 1 or p]
    rank = len(parts[0])
    dim = call.get("dim", 0) % rank
    if any(call.is_padded(part[dim]) for part in parts[:-1]):
        raise NotPaddableError("puts elements after padding")
    last = parts[-1][dim]
    if call.is_padded(last) and len(last) > 1 and len(parts) > 1:
        raise NotPaddableError("puts elements before a flattened dimension")
    others = [[d for i, d in enumerate(part) if i != dim] for part in parts]
    for other in others[1:]:
        call.require_same(others[0], other)
    own = structure.of_size(call.result.shape[dim]) if len(parts) > 1 else last
    return (*others[0][:dim], own, *others[0][dim:])


@rule(aten.stack.default)
def _stack(call: Call) -> Structure:
    parts = [call.of_node(node) for node in call["tensors"]]
    for part in parts[1:]:
        call.require_same(parts[0], part)
    dim = call.get("dim", 0) % (len(parts[0]) + 1)
    return (*parts[0][:dim], structure.joined([len(parts)]), *parts[0][dim:])


@rule(
    aten.select_scatter.default,
    aten.slice_scatter.default,
)
def _scatter_part(call: Call) -> Structure:
    given, source = call.of("self"), call.of("src")
    dim = call.get("dim", 0) % len(given)
    if call.is_padded(given[dim]):
        raise NotPaddableError("writes a part of a dimension whose size varies")
    rest = [d for i, d in enumerate(given) if i != dim]
    if len(source) == len(given):
        source = source[:dim] + source[dim + 1 :]
    call.require_same(rest, source)
    return given


@rule(aten.flip.default)
def _flip(call: Call) -> Structure:
    """The last true element is to be first, so a flip along padding is a look-up of positions."""
    given = call.of("self")
    dims = call.dims("dims", len(given)) if call["dims"] else ()
    padded = call.padded_dims(given, dims)
    if any(len(given[d]) > 1 for d in padded):
        raise NotPaddableError("reverses a flattened dimension")
    if padded:

        def rewrite(w: Writer, args: Arguments) -> Any:
            value = args["self"]
            if rest := [d for d in dims if d not in padded]:
                value = w.emit(aten.flip.default, value, rest)
            for d in padded:
                (size,) = given[d]
                last = w.emit(aten.sub.Scalar, w.number(size), 1)
                index = w.emit(aten.sub.Tensor, last, w.arange(w.size(size)))
                index = w.emit(aten.clamp_min.default, index, 0)
                value = w.emit(aten.index_select.default, value, d, index)
            return value

        call.rewrite(rewrite)
    return given
