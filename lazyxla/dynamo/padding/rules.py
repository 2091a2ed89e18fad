"""The table of operators that padded graphs may have, and how their rules are written.

A rule is called once for each operator of a graph with symbolic sizes. From the structures of the
operands it says the structure of the result, and it notes what has to be different where the
graph's tensors are padded: operands whose padding must hold certain values first (`fill`), or other
operators instead of this one (`rewrite`). It raises `NotPaddableError` where true elements of the
result would depend on padding all the same. What padding holds is anything else, nan included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from lazyxla.dynamo.padding import structure
from lazyxla.dynamo.padding.structure import (
    Dim,
    NotPaddableError,
    Structure,
    UniformDim,
    has_symbol,
)

if TYPE_CHECKING:
    from lazyxla.dynamo.padding.rewriting import Writer

Results = Structure | list[Structure | None]
Arguments = dict[str, Any]
"""A call's arguments by name, defaults included."""
Rewrite = Callable[["Writer", Arguments], Any]

NOTE = "lazyxla_padding"
"""The key of a node's note in its meta."""


class RefusedError(Exception):
    """A graph that must have exact sizes, because of an operator."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node


class Fill(NamedTuple):
    """Padding of an operand that must hold a value, in some of its dimensions."""

    argument: str
    structure: Structure
    value: float
    dims: tuple[int, ...]


@dataclass(slots=True)
class Note:
    """How padding affects a node."""

    results: Results
    fills: list[Fill] = field(default_factory=list)
    rewrite: Rewrite | None = None


class Call:
    """An operator's call as its rule sees it."""

    def __init__(self, node: fx.Node, padded: frozenset[Any]) -> None:
        self.node = node
        self.note = Note(())
        self.padded = padded
        schema: Any = node.target._schema  # type: ignore[union-attr]
        given = dict(zip((a.name for a in schema.arguments), node.args, strict=False))
        self.arguments: Arguments = {
            a.name: _value(given.get(a.name, node.kwargs.get(a.name, a.default_value)))
            for a in schema.arguments
        }
        self.types = {a.name: str(a.type) for a in schema.arguments}

    def __getitem__(self, name: str) -> Any:
        """An argument; a symbolic number as an expression."""
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        value = self.arguments.get(name)
        return default if value is None else value

    @property
    def result(self) -> Any:
        """What the call returns: a fake tensor or several."""
        return self.node.meta["val"]

    def of(self, name: str) -> Structure:
        """The structure of a tensor argument."""
        return self.of_node(self.arguments[name])

    def of_node(self, node: fx.Node) -> Structure:
        return tuple(map(self._ordered, structure_of(node)))

    def _ordered(self, dim: Dim) -> Dim:
        """A dimension whose factors may have any order gets that of the other operands."""
        if not isinstance(dim, UniformDim) or len(dim) < 2 or keeps_uniform(self.node.target):
            return dim
        others = {
            other
            for node in self.node.all_input_nodes
            if is_tensor(node)
            for other in structure_of(node)
            if not isinstance(other, UniformDim)
            and structure.product(other) == structure.product(dim)
        }
        if len(others) > 1:
            raise NotPaddableError("combines tensors that are padded differently")
        return others.pop() if others else tuple(dim)

    def dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = self.arguments[name].meta["val"].dtype
        return dtype

    def tensors(self) -> list[str]:
        """The names of the arguments that are tensors."""
        return [n for n, v in self.arguments.items() if is_tensor(v)]

    def is_padded(self, *dims: Dim) -> bool:
        """Whether any of the dimensions has elements that are padding."""
        return any(self.has_symbol(f) for dim in dims for f in dim)

    def padded_dims(self, given: Structure, among: Iterable[int] | None = None) -> tuple[int, ...]:
        """The positions of dimensions that are padded."""
        dims = range(len(given)) if among is None else among
        return tuple(d for d in dims if self.is_padded(given[d]))

    def has_symbol(self, value: Any) -> bool:
        return has_symbol(value, self.padded)

    def dims(self, name: str, rank: int) -> tuple[int, ...]:
        """Positions that an argument says, as an integer or a list; all if it says none."""
        given = self.arguments.get(name)
        if given is None or given == []:
            return tuple(range(rank))
        listed = given if isinstance(given, (list, tuple)) else [given]
        return tuple(d % max(rank, 1) for d in listed) if rank else ()

    def require_constant(self, *names: str) -> None:
        """Refuses padding in arguments."""
        for name in names:
            if is_tensor(self.arguments.get(name)) and self.is_padded(*self.of(name)):
                raise NotPaddableError(f"its argument {name!r} would be padded")

    def require_same(self, ours: Iterable[Dim], theirs: Iterable[Dim]) -> None:
        ours, theirs = tuple(ours), tuple(theirs)
        if ours != theirs and self.is_padded(*ours, *theirs):
            raise NotPaddableError("combines tensors that are padded differently")

    def require_whole(self, dim: Dim) -> None:
        """Refuses dimensions in which padding is before true elements."""
        if self.is_padded(dim[1:]):
            raise NotPaddableError("counts positions across padding")

    def fill(self, name: str, value: float, dims: Iterable[int] | None = None) -> None:
        """Notes that an argument's padding must hold a value, in some dimensions or in all."""
        if not is_tensor(self.arguments.get(name)):
            return
        given = self.of(name)
        if padded := self.padded_dims(given, dims):
            self.note.fills.append(Fill(name, given, value, padded))

    def rewrite(self, rewrite: Rewrite) -> None:
        """Notes that other operators are to be there instead."""
        self.note.rewrite = rewrite


class Entry(NamedTuple):
    rule: Callable[[Call], Results]
    sizes: tuple[str, ...]  # the arguments that may have symbols, as sizes
    numbers: bool  # whether the rule minds symbols in numbers


RULES: dict[Any, Entry] = {}

_aten = torch.ops.aten
UNIFORM = {
    *(_aten.zeros.default, _aten.ones.default, _aten.full.default, _aten.expand.default),
    *(_aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default),
    *(_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default),
    *(_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default),
    *(_aten.clone.default, _aten._to_copy.default, _aten.detach.default, _aten.alias.default),
    *(_aten.permute.default, _aten.transpose.int, _aten.t.default),
    *(_aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.squeeze.default),
}
"""Besides element-wise ones, operators that keep values constant along a dimension constant."""


def rule(
    *targets: Any, sizes: tuple[str, ...] = (), numbers: bool = False
) -> Callable[[Callable[[Call], Results]], Callable[[Call], Results]]:
    """Enters the rule of operators.

    Args:
        sizes: arguments that are sizes, which the padded graph has those of its bucket for.
        numbers: whether the rule itself minds arguments that are symbolic numbers.
    """

    def enter(function: Callable[[Call], Results]) -> Callable[[Call], Results]:
        for target in targets:
            RULES[target] = Entry(function, sizes, numbers)
        return function

    return enter


def keeps_uniform(target: Any) -> bool:
    """Whether a value that is constant along a dimension remains so."""
    pointwise = torch.Tag.pointwise in target.tags
    return target in UNIFORM or (pointwise and torch.Tag.nondeterministic_seeded not in target.tags)


def is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and hasattr(value.meta.get("val"), "device")


def structure_of(node: fx.Node) -> Structure:
    results: Any = node.meta[NOTE].results
    assert isinstance(results, tuple)
    return results


def constant(value: Any) -> Structure:
    """The structure of a tensor without padding."""
    return tuple(
        () if isinstance(size, int) and size == 1 else (structure.expression(size),)
        for size in value.shape
    )


def _value(argument: Any) -> Any:
    if isinstance(argument, (list, tuple)):
        return [_value(a) for a in argument]
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        expr = value.node.expr
        return int(expr) if getattr(expr, "is_Integer", False) else expr
    if isinstance(argument, fx.Node) and isinstance(value, (int, float)):
        return value
    return argument
