"""Whether a graph computes the same on padded tensors, and what has to be different for that."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from lazyxla.dynamo.padding import structure
from lazyxla.dynamo.padding.rules import (
    NOTE,
    RULES,
    Call,
    Entry,
    Note,
    RefusedError,
    Results,
    constant,
    is_tensor,
    keeps_uniform,
    structure_of,
)
from lazyxla.dynamo.padding.rules_elementwise import pointwise
from lazyxla.dynamo.padding.structure import NotPaddableError, Structure, has_symbol

aten = torch.ops.aten

_ASSERTIONS = (
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
)
_POINTWISE = Entry(pointwise, (), True)


def analyse(graph: fx.Graph, padded: frozenset[Any]) -> None:
    """Gives each node of a graph its note.

    Args:
        graph: AOTAutograd's: an inference graph, or a joint graph of forward and backward.
        padded: the symbols that get sizes of buckets.

    Raises:
        RefusedError: padding might change the results.
    """
    notes: dict[fx.Node, Note] = {}
    nodes = list(graph.nodes)
    tangents = [n for n in nodes if n.op == "placeholder" and n.name.startswith("tangents")]
    # What a tangent looks like is known from the result that it is the gradient of.
    first = min((nodes.index(user) for t in tangents for user in t.users), default=0)
    ordered = [n for n in nodes[:first] if n not in tangents] + tangents
    ordered += [n for n in nodes[first:] if n not in tangents]
    try:
        for node in ordered:
            try:
                note = _note(node, padded, node in tangents)
                if note is not None:
                    _check_growth(note.results, padded)
            except NotPaddableError as error:
                raise RefusedError(node, str(error)) from error
            if note is not None:
                node.meta[NOTE] = notes[node] = note
        _check_devices(list(notes), padded)
    except RefusedError:
        for node in notes:
            del node.meta[NOTE]
        raise


def _check_devices(nodes: list[fx.Node], padded: frozenset[Any]) -> None:
    """Refuses padded tensors that are elsewhere than the first one."""
    first: torch.device | None = None
    for node in nodes:
        for value in tree_leaves(node.meta["val"]):
            if isinstance(value, torch.Tensor) and _has_symbol(value, padded):
                first = first or value.device
                if value.device != first or first.type != "lazyxla":
                    raise RefusedError(node, f"makes a tensor of varying size on {value.device}")


def _note(node: fx.Node, padded: frozenset[Any], is_tangent: bool) -> Note | None:
    value = node.meta.get("val")
    if node.op == "placeholder":
        if not is_tensor(node):
            return None
        return Note(_tangent(node, padded) if is_tangent else _argument(node, padded))
    if node.op != "call_function":
        return Note(constant(value)) if node.op == "get_attr" and is_tensor(node) else None
    if node.target in _ASSERTIONS or not isinstance(value, (torch.Tensor, list, tuple)):
        return None
    if node.target is operator.getitem:
        source, index = node.args
        results: Any = source.meta[NOTE].results  # type: ignore[union-attr]
        return Note(results[index])
    if not isinstance(node.target, OpOverload):
        raise NotPaddableError("is no operator of PyTorch's")
    call = Call(node, padded)
    values = [n.meta.get("val") for n in (*node.all_input_nodes, node)]
    if not any(_has_symbol(v, padded) for v in values):
        return Note(_constants(value))
    entry = RULES.get(node.target)
    if entry is None and torch.Tag.pointwise in node.target.tags:
        entry = _POINTWISE
    if entry is None or (node.target._schema.is_mutable and node.target != aten.copy_.default):
        raise NotPaddableError("has no rule for padded dimensions")
    for name, argument in call.arguments.items():
        if entry.numbers or is_tensor(argument) or not has_symbol(argument, padded):
            continue
        if name not in entry.sizes:
            raise NotPaddableError(f"takes a size that varies as its argument {name!r}")
    call.note.results = entry.rule(call)
    if not keeps_uniform(node.target):
        call.note.results = _plain(call.note.results)
    _check(value, call.note.results, padded)
    return call.note


def _plain(results: Results) -> Results:
    if isinstance(results, list):
        return [None if r is None else structure.plain(r) for r in results]
    return structure.plain(results)


def _argument(node: fx.Node, padded: frozenset[Any]) -> Structure:
    value = node.meta["val"]
    if not _has_symbol(value, padded):
        return constant(value)
    return tuple(
        structure.of_size(s) if has_symbol(structure.expression(s), padded) else d
        for s, d in zip(value.shape, constant(value), strict=True)
    )


def _tangent(node: fx.Node, padded: frozenset[Any]) -> Structure:
    """A gradient of a result: padded as that is, which may be a flattened tensor."""
    (output,) = node.graph.find_nodes(op="output")
    source = getattr(node.meta.get("desc"), "output", None)
    results = tree_leaves(output.args)
    described = list(output.meta.get("desc") or ())
    if source is not None and len(described) == len(results) and source in described:
        result = results[described.index(source)]
        if is_tensor(result) and NOTE in result.meta:
            found = structure_of(result)
            _check(node.meta["val"], found, padded)
            return found
    return _argument(node, padded)


def _has_symbol(value: Any, padded: frozenset[Any]) -> bool:
    if isinstance(value, torch.Tensor):
        return value._has_symbolic_sizes_strides and has_symbol(
            [structure.expression(s) for s in value.shape], padded
        )
    if isinstance(value, (list, tuple)):
        return any(_has_symbol(v, padded) for v in value)
    return hasattr(value, "node") and has_symbol(value.node.expr, padded)


def _constants(value: Any) -> Results:
    if isinstance(value, (list, tuple)):
        return [None if v is None else constant(v) for v in value]
    return constant(value)


def _check_growth(results: Results, padded: frozenset[Any]) -> None:
    """Refuses sizes that may be less in a bucket than those that are padded to it."""
    listed = results if isinstance(results, list) else [results]
    for factor in (f for dims in listed for dim in dims or () for f in dim):
        if not structure.grows(factor, padded):
            raise NotPaddableError(f"makes a tensor of {factor} elements")


def _check(value: Any, results: Results, padded: frozenset[Any]) -> None:
    """Checks a rule: its structures have the sizes that PyTorch says."""
    pairs = (
        zip(value, results, strict=True) if isinstance(value, (list, tuple)) else [(value, results)]
    )
    for tensor, dims in pairs:
        if tensor is None or dims is None:
            continue
        theirs = [structure.expression(size) for size in tensor.shape]
        same = len(dims) == len(theirs) and all(
            not has_symbol([dim, size], padded)
            or sympy.expand(sympy.sympify(structure.product(dim)) - size) == 0  # type: ignore[arg-type]
            for dim, size in zip(dims, theirs, strict=True)
        )
        if not same:
            raise NotPaddableError(f"makes a tensor {theirs} of dimensions {dims}")
