"""What an FX graph computes, as a text that is the same in every process.

By it a graph of torch.compile's is found on disk, and processes find out whether theirs are the
same. It says all that lowering the graph (fx_graph.py) reads.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from lazyxla.lowering.fx_graph import DRAW, TRUE_SIZE, FxGraph, attribute_of, is_function

_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Unknown(Exception):
    """Something means something in this process only."""


def content_of(graph: FxGraph) -> str:
    """A checksum of what the graph computes; empty if it has something that cannot be said."""
    try:
        text = "\n".join(_lines(graph))
    except _Unknown:
        return ""
    return hashlib.sha256(text.encode()).hexdigest()


def _lines(graph: FxGraph) -> Iterator[str]:
    names: dict[fx.Node, str] = {}
    count = itertools.count()
    for node in graph.inputs:
        names[node] = f"%{next(count)}"
        yield f"{names[node]} {_type(node.meta['val'])} {TRUE_SIZE in node.meta}"
    for node in graph.nodes:
        names[node] = f"%{next(count)}"
        if node.op == "get_attr":
            yield f"{names[node]} {_attribute(node)}"
            continue
        arguments = _argument(node.args, names), _argument(dict(node.kwargs), names)
        draw = node.meta.get(DRAW)
        yield f"{names[node]} {_target(node)} {arguments} {draw} {_type(node.meta.get('val'))}"
    yield f"-> {_argument(graph.outputs, names)}"


def _target(node: fx.Node) -> str:
    target: Any = node.target
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return str(target.name())
    raise _Unknown


def _attribute(node: fx.Node) -> str:
    value = attribute_of(node)
    if is_function(node):
        return "{\n" + "\n".join(_lines(FxGraph.of(value.graph))) + "\n}"
    if isinstance(value, torch.Tensor):
        return f"{_type(value)} {value.detach().cpu().tolist()}"
    raise _Unknown


def _argument(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        if value in names:
            return names[value]
        if is_function(value):  # is no value of a graph, but what an operator calls
            return _attribute(value)
        raise _Unknown
    if value is None or type(value) in (bool, int, float, complex, str):
        return repr(value)
    if isinstance(value, _NAMED):
        return str(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_argument(each, names) for each in value) + "]"
    if isinstance(value, dict):
        return str({key: _argument(each, names) for key, each in value.items()})
    if isinstance(value, slice):
        return f"slice({_argument((value.start, value.stop, value.step), names)})"
    raise _Unknown


def _type(value: Any) -> str:
    """Of a node's value: a tensor's, or several."""
    if value is None:
        return "None"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_type, value)) + "]"
    if not isinstance(value, torch.Tensor):
        raise _Unknown
    sizes, strides = list(value.shape), list(value.stride())
    if not all(type(n) is int for n in [*sizes, *strides]):
        raise _Unknown
    return f"{value.dtype} {sizes} {strides} {value.device.type}"
