"""as_strided in a traced graph: its numbers count elements of memory, and a graph has values.

A rule takes a value for a tensor whose elements are contiguous from the first one on. Where the
operand's are in another order, it is put into that order before, and what is written to it back
from it after; a part of an argument's memory is copied. (Neither costs a program anything.) Where
more is read than the operand, as of an argument which is a part of another tensor, PyTorch has to
run the operator. To write there is an error: what a graph writes to an argument is the argument.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from lazyxla.dynamo.tensor_meta import TensorMeta
from lazyxla.lowering.fx_graph import user_frame
from lazyxla.runtime import BACKEND

aten = torch.ops.aten
_READS = (aten.as_strided.default, aten.as_strided_copy.default)
_WRITES = (aten.as_strided_scatter.default,)


def order_operands(graph: fx.Graph) -> None:
    """Does so for all such operators of a static graph that are the device's.

    Raises:
        NotImplementedError: one writes more than its operand.
    """
    for node in [n for n in graph.nodes if n.target in _READS + _WRITES]:
        if node.meta["val"].device.type != BACKEND:
            continue  # PyTorch runs it, on memory
        if node.target in _READS:
            _read_memory(node)
        operand: Any = node.args[0]
        value = operand.meta["val"]
        order, start = _order(value), value.storage_offset()
        if reaches_beyond(node):
            if node.target in _READS:
                continue
            raise NotImplementedError(
                f"lazyxla: {_described(node)} writes elements that the tensor itself has not. "
                "torch.compile cannot pass them on: make the view, or write, outside the function"
            )
        if order == sorted(order) and start == 0:
            continue
        sizes, strides, offset = _geometry(node)
        with graph.inserting_before(node):
            ordered = _permuted(graph, operand, order)
        sources = node.args[1:2] if node.target in _WRITES else ()
        node.args, node.kwargs = (ordered, *sources, sizes, strides, offset - start), {}
        if node.target in _WRITES:
            with graph.inserting_after(node):
                back = graph.call_function(aten.permute.default, (node, _inverse(order)))
            back.meta["val"] = node.meta["val"]
            for user in [user for user in node.users if user is not back]:
                user.replace_input_with(node, back)
            node.meta["val"] = ordered.meta["val"]


def _read_memory(node: fx.Node) -> None:
    """Has a node read what its operand is a view of: its numbers mean that memory."""
    operand: Any = node.args[0]
    sizes, strides, offset = _geometry(node)
    base = operand
    while (viewed := viewed_by(base)) is not None:
        if viewed.meta["val"].dtype != operand.meta["val"].dtype:
            break
        base = viewed
    if base is not operand:
        node.args, node.kwargs = (base, sizes, strides, offset), {}


def reaches_beyond(node: fx.Node) -> bool:
    """Whether a node is such an operator, and its numbers mean memory that the operand has not."""
    if node.target not in _READS + _WRITES:
        return False
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    sizes, strides, offset = _geometry(node)
    if 0 in sizes:
        return False
    elements = 1
    for dim in reversed(_order(value)):
        if value.shape[dim] != 1:
            if value.stride()[dim] != elements:
                return True  # it has gaps, or overlaps itself
            elements *= value.shape[dim]
    first = offset - value.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return first < 0 or last >= elements


def viewed_by(node: fx.Node, undeclared: bool = False) -> fx.Node | None:
    """The node whose tensor a node is a view of, if it is one.

    `undeclared`: or of which PyTorch's kernel makes a view and the schema says nothing.
    """
    owner: Any = node.args[0] if node.target is operator.getitem else node
    if not isinstance(owner.target, OpOverload):
        return None
    arguments = owner.target._schema.arguments
    is_view = arguments and arguments[0].alias_info is not None
    is_view = is_view or (undeclared and owner.target is aten._unsafe_view.default)
    return owner.args[0] if is_view else None


def _geometry(node: fx.Node) -> tuple[list[int], list[int], int]:
    arguments: list[Any] = list(node.args[1 + (node.target in _WRITES) :])
    sizes, strides, *rest = arguments
    offset: Any = rest[0] if rest else node.kwargs.get("storage_offset")
    if offset is None:
        offset = node.args[0].meta["val"].storage_offset()  # type: ignore[union-attr]
    return sizes, strides, offset


def _described(node: fx.Node) -> str:
    sizes, strides, offset = _geometry(node)
    where = user_frame(node)
    return f"as_strided({sizes}, {strides}, {offset}){f' ({where})' if where else ''}"


def _order(value: Any) -> list[int]:
    """The dimensions from the outermost in memory to the innermost."""
    strides = value.stride()
    return sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _permuted(graph: fx.Graph, node: fx.Node, order: list[int]) -> fx.Node:
    """A node's tensor with its dimensions in this order, at the beginning of its memory."""
    value: Any = node.meta["val"]
    sizes, strides = (tuple(n[dim] for dim in order) for n in (value.shape, value.stride()))
    start = value.storage_offset()
    result = graph.call_function(aten.permute.default, (node, order))
    result.meta["val"] = TensorMeta(value.dtype, sizes, strides, start, value.device)
    if start != 0:
        kept: dict[str, Any] = {"memory_format": torch.contiguous_format}
        result = graph.call_function(aten.clone.default, (result,), kept)
        result.meta["val"] = TensorMeta(value.dtype, sizes, strides, 0, value.device)
    return result
