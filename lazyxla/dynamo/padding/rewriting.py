"""Writing a padded graph: the copy of a graph with symbolic sizes for the sizes of a bucket."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lazyxla.dynamo.padding.rules import NOTE, Note, RefusedError
from lazyxla.dynamo.padding.structure import Dim, Factor, Structure, has_symbol
from lazyxla.dynamo.symbolic_numbers import evaluate
from lazyxla.dynamo.tensor_meta import TensorMeta
from lazyxla.lowering.fx_graph import TRUE_SIZE

aten = torch.ops.aten
_getitem = operator.getitem
Key = tuple[Any, torch.dtype, torch.device]
"""A number that varies within a bucket: an expression of true sizes, and its 0-dim tensor's."""


@dataclass(slots=True)
class Written:
    """A padded graph. Its last arguments are the numbers."""

    graph: fx.Graph
    numbers: list[Key]


class Writer:
    """Adds operators to a padded graph; rules that rewrite an operator are given one."""

    def __init__(self, graph: fx.Graph, bindings: dict[Any, int], padded: frozenset[Any]) -> None:
        self._graph = graph
        self.bindings = bindings  # what all symbols have as sizes
        self._padded = padded
        self._numbers: dict[Key, fx.Node] = {}
        self._masks: dict[Dim, fx.Node] = {}
        self._last_argument: fx.Node | None = None
        self.device = torch.device("cpu")
        self.stack_trace: str | None = None

    def size(self, value: Any) -> Any:
        """A size of the bucket, for a number, an expression or lists of them."""
        if isinstance(value, (list, tuple)):
            return [self.size(v) for v in value]
        return int(value.xreplace(self.bindings)) if hasattr(value, "xreplace") else value

    def number(
        self,
        value: Factor,
        dtype: torch.dtype = torch.int64,
        device: torch.device | None = None,
    ) -> fx.Node:
        """A number that depends on the true sizes, as a 0-dim tensor: an argument of the graph."""
        key = (value, dtype, device or self.device)
        if key not in self._numbers:
            name = f"number_{len(self._numbers)}"
            last = self._last_argument
            with self._graph.inserting_after(last) if last else self._graph.inserting_before():
                node = self._graph.placeholder(name)
            node.meta = {"val": TensorMeta(dtype, (), (), 0, key[2]), TRUE_SIZE: True}
            self._numbers[key] = self._last_argument = node
        return self._numbers[key]

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Adds an operator. Returns its node, or the nodes of its several results."""
        value = target(*_on_meta(args), **_on_meta(kwargs))
        node = self._graph.call_function(target, args, kwargs)
        if isinstance(value, torch.Tensor):
            return self._noted(node, value)
        node.meta = {"val": [self._meta(v) for v in value], "stack_trace": self.stack_trace}
        return self.parts(node)

    def parts(self, node: fx.Node) -> list[Any]:
        """The several results of a node."""
        parts = []
        for i, value in enumerate(node.meta["val"]):
            part = self._graph.call_function(_getitem, (node, i))
            part.meta = {"val": value, "stack_trace": self.stack_trace}
            parts.append(part)
        return parts

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        if node.meta["val"].dtype == dtype:
            return node
        result: fx.Node = self.emit(aten._to_copy.default, node, dtype=dtype)
        return result

    def arange(self, size: int) -> fx.Node:
        result: fx.Node = self.emit(aten.arange.default, size, device=self.device)
        return result

    def padding(self, structure: Structure, dims: Iterable[int]) -> fx.Node | None:
        """True at the padding of some dimensions; of the tensor's rank, for broadcasting."""
        result = None
        for i in dims:
            if (mask := self._padding_of(structure[i])) is None:
                continue
            shape = [1] * len(structure)
            shape[i] = -1
            mask = self.emit(aten.view.default, mask, shape)
            either = aten.logical_or.default
            result = mask if result is None else self.emit(either, result, mask)
        return result

    def fill(
        self, node: fx.Node, structure: Structure, value: float, dims: Iterable[int] | None = None
    ) -> fx.Node:
        """A tensor with a value in the padding of some dimensions, or of all."""
        mask = self.padding(structure, range(len(structure)) if dims is None else dims)
        if mask is None:
            return node
        result: fx.Node = self.emit(aten.masked_fill.Scalar, node, mask, value)
        return result

    def _padding_of(self, dim: Dim) -> fx.Node | None:
        """True at the indices of a dimension that are padding."""
        if dim in self._masks:
            return self._masks[dim]
        sizes = [self.size(factor) for factor in dim]
        result = None
        for i, factor in enumerate(dim):
            if not has_symbol(factor, self._padded):
                continue
            mask = self.emit(aten.ge.Tensor, self.arange(sizes[i]), self.number(factor))
            if len(dim) > 1:
                shape = [1] * len(dim)
                shape[i] = -1
                mask = self.emit(aten.view.default, mask, shape)
                mask = self.emit(aten.expand.default, mask, sizes)
            either = aten.logical_or.default
            result = mask if result is None else self.emit(either, result, mask)
        if result is not None and len(dim) > 1:
            # No reshape, whose result would be taken for a view of the few elements it repeats.
            dense = self.emit(aten.clone.default, result, memory_format=torch.contiguous_format)
            result = self.emit(aten.view.default, dense, [-1])
        if result is not None:
            self._masks[dim] = result
        return result

    def _noted(self, node: fx.Node, value: torch.Tensor) -> fx.Node:
        node.meta = {"val": self._meta(value), "stack_trace": self.stack_trace}
        return node

    def _meta(self, value: torch.Tensor) -> TensorMeta:
        strides, offset = value.stride(), int(value.storage_offset())
        return TensorMeta(value.dtype, tuple(value.shape), strides, offset, self.device)

    def ends_arguments(self, node: fx.Node) -> None:
        self._last_argument = node

    @property
    def numbers(self) -> list[Key]:
        return list(self._numbers)


def write(
    graph: fx.Graph, bindings: dict[Any, int], padded: frozenset[Any], device: torch.device
) -> Written:
    """The graph for the sizes of a bucket.

    Args:
        graph: one whose nodes have notes.
        bindings: the sizes; of padded symbols those of the bucket.
        padded: symbols whose true value may be less.
        device: where its padded tensors are.
    """
    copy = fx.Graph(owning_module=graph.owning_module)
    writer = Writer(copy, bindings, padded)
    writer.device = device
    known: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "output":
            copy.output(fx.map_arg(node.args[0], known.__getitem__))
            continue
        writer.stack_trace = node.meta.get("stack_trace")
        value = _static(writer, node.meta.get("val"))
        if node.op != "call_function":
            new = copy.create_node(node.op, node.target, node.args, node.kwargs, node.name)
            new.meta = {"val": value}
            known[node] = new
            if node.op == "placeholder":
                writer.ends_arguments(new)
            if isinstance(value, (int, float, bool)):
                known[node] = value
        elif isinstance(value, (int, float, bool)):
            known[node] = value
        elif value is not None:
            try:
                known[node] = _write_node(writer, node, value, known)
            except Exception as error:
                raise RefusedError(node, f"cannot be written for padded sizes: {error}") from error
    return Written(copy, writer.numbers)


def _write_node(writer: Writer, node: fx.Node, value: Any, known: dict[fx.Node, Any]) -> Any:
    note: Note = node.meta.get(NOTE) or Note(())  # one added since is of no padded tensor
    if node.target is _getitem:
        source, index = node.args
        return known[source][index]  # type: ignore[index]
    args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
    target: Any = node.target
    schema = target._schema
    names = [a.name for a in schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    for fill in note.fills:
        operand = given[fill.argument]
        given[fill.argument] = writer.fill(operand, fill.structure, fill.value, fill.dims)
    if note.rewrite is not None:
        defaults = {a.name: a.default_value for a in schema.arguments}
        return _checked(node, note.rewrite(writer, {**defaults, **given}), value)
    args = tuple(given.pop(name) for name in names[: len(args)])
    new = writer._graph.call_function(target, args, given)
    new.meta = {"val": value, "stack_trace": writer.stack_trace}
    return writer.parts(new) if isinstance(value, list) else new


def _checked(node: fx.Node, result: Any, expected: Any) -> Any:
    """The result of a rewritten operator, checked for the dtypes and sizes that PyTorch infers."""
    ours = result if isinstance(result, list) else [result]
    theirs = expected if isinstance(expected, list) else [expected]
    for new, meta in zip(ours, theirs, strict=True):
        if new is None:
            continue
        actual = new.meta["val"]
        if (actual.dtype, tuple(actual.shape)) != (meta.dtype, tuple(meta.shape)):
            raise TypeError(
                f"{actual.dtype}{list(actual.shape)} instead of {meta.dtype}{list(meta.shape)}"
            )
    return result


def _static(writer: Writer, value: Any) -> Any:
    """A node's value with the bucket's sizes."""
    if isinstance(value, torch.Tensor):
        shape, strides, offset = (
            tuple(evaluate(n, writer.bindings) for n in numbers)
            for numbers in (value.shape, value.stride(), (value.storage_offset(),))
        )
        return TensorMeta(value.dtype, shape, strides, offset[0], value.device)
    if isinstance(value, (list, tuple)):
        return [_static(writer, v) for v in value]
    return evaluate(value, writer.bindings)


def _on_meta(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        meta = argument.meta["val"]
        return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device="meta")
    if isinstance(argument, (list, tuple)):
        return type(argument)(_on_meta(a) for a in argument)
    if isinstance(argument, dict):
        return {k: _on_meta(v) for k, v in argument.items()}
    return torch.device("meta") if isinstance(argument, torch.device) else argument
