"""What equal layers are: modules of the same parts, with tensors of the same shapes and dtypes.

The other attributes of a module may decide what its forward does (a dropout's probability) or may
not (a layer's number). Where attributes differ, the layers are traced, and their graphs compared:
see tracing.py. Attributes are compared with all that they hold: a config that its user has changed
since makes another graph.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

_PLAIN = {
    *(bool, int, str, bytes, type(None), type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
}
# What these objects hold is not compared: code does not change, and a layer's modules and tensors
# are read as such.
_WITHOUT_CONTENT = (nn.Module, torch.Tensor, FunctionType, ModuleType, type)
_MOST_OBJECTS = 1000
_OF_EVERY_MODULE = set(vars(nn.Module())) - {"training"}
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")

Attributes = tuple[tuple[str, Any], ...]
"""Names and values, the latter as something that can be hashed."""


class Structure(NamedTuple):
    """Names and types of a layer's parts; name, shape and dtype of each of its tensors."""

    parts: tuple[tuple[str, type], ...]
    tensors: tuple[tuple[str, torch.Size, torch.dtype], ...]


class Same:
    """An object that is equal to itself only.

    It is not kept alive, as it may be a method of the layer whose calls are found by it; where it
    cannot be referred to weakly, it is, so that no other takes its id.
    """

    __slots__ = ("_id", "_value")

    def __init__(self, value: object) -> None:
        self._id = id(value)
        self._value: Callable[[], object]
        try:
            self._value = weakref.ref(value)
        except TypeError:
            self._value = lambda: value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same) or self._id != other._id:
            return False
        value = self._value()
        return value is not None and value is other._value()

    def __hash__(self) -> int:
        return self._id


class Comparison:
    """Makes values comparable, and with them what the objects among them hold."""

    def __init__(self) -> None:
        self._objects: list[object] = []
        self._noted: set[int] = set()

    def of(self, value: Any, within: tuple[int, ...] = ()) -> Any:
        """Something that is equal for equal values and can be hashed. Other objects than numbers,
        strings and containers are equal to themselves only.

        Args:
            within: the ids of the containers that it is in.
        """
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind in (float, complex):  # bit by bit: 0.0 is not -0.0, and nan is nan
            return kind, struct.pack("dd", value.real, value.imag)
        if kind is MethodType:
            return kind, self.of(value.__func__), self.of(value.__self__)
        if isinstance(value, (list, tuple, dict, set, frozenset)) and id(value) not in within:
            inside = (*within, id(value))
            if isinstance(value, (set, frozenset)):
                return kind, frozenset(self.of(each, inside) for each in value)
            each_of = value.items() if isinstance(value, dict) else value
            return kind, tuple(self.of(each, inside) for each in each_of)
        if id(value) not in self._noted and not isinstance(value, _WITHOUT_CONTENT):
            self._noted.add(id(value))
            self._objects.append(value)
        return Same(value)

    def contents(self) -> tuple[Any, ...]:
        """The attributes of all objects that were met, in order, and of those met in them."""
        found: list[Any] = []
        for each in self._objects:  # which grows meanwhile
            if len(found) == _MOST_OBJECTS:
                break
            found.append(self.of(getattr(each, "__dict__", None)))
        return tuple(found)


class Layers(NamedTuple):
    """Equal layers. `tensors` has a list of parameters and buffers for each layer."""

    structure: Structure
    attributes: tuple[Attributes, ...]
    tensors: list[list[torch.Tensor]]
    comparison: Comparison
    """Of the attributes, with what they hold."""

    @property
    def names(self) -> list[str]:
        """The names of a layer's tensors."""
        return [name for name, _, _ in self.structure.tensors]


def read(layers: Iterable[nn.Module]) -> tuple[list[nn.Module], Layers]:
    """The layers as a list, and what they consist of.

    Raises:
        TypeError: these are no modules.
        ValueError: there are none, they are not equal, or they have hooks.
    """
    modules = list(layers)
    for number, layer in enumerate(modules):
        if not isinstance(layer, nn.Module):
            raise TypeError(
                f"scan_layers takes modules, layer {number} is a {type(layer).__name__}"
            )
    if not modules:
        raise ValueError("scan_layers takes at least one layer")
    comparison = Comparison()
    found = [_read_one(number, layer, comparison) for number, layer in enumerate(modules)]
    first = found[0][0]
    for number, (structure, _, _) in enumerate(found):
        if structure != first:
            raise ValueError(
                f"scan_layers takes equal layers, but layer {number} differs from layer 0: "
                + _difference(first, structure)
            )
    attributes = tuple(of_layer for _, of_layer, _ in found)
    if all(of_layer == attributes[0] for of_layer in attributes):
        attributes = attributes[:1]
    return modules, Layers(first, attributes, [t for _, _, t in found], comparison)


def _read_one(
    number: int, layer: nn.Module, comparison: Comparison
) -> tuple[Structure, Attributes, list[torch.Tensor]]:
    parts = list(layer.named_modules())
    named = [*layer.named_parameters(), *layer.named_buffers()]
    structure = Structure(
        tuple((name, type(part)) for name, part in parts),
        tuple((name, tensor.shape, tensor.dtype) for name, tensor in named),
    )
    attributes = tuple(
        a for name, part in parts for a in _attributes(number, name, part, comparison)
    )
    return structure, attributes, [tensor for _, tensor in named]


def _attributes(
    number: int, name: str, part: nn.Module, comparison: Comparison
) -> Iterator[tuple[str, Any]]:
    prefix = f"{name}." if name else ""
    for attribute, value in vars(part).items():
        if attribute not in _OF_EVERY_MODULE:
            yield prefix + attribute, comparison.of(value)
        elif value and attribute in _BACKWARD_HOOKS:
            raise ValueError(_hooks_text(number, name, part, "backward"))
        elif value and attribute in _FORWARD_HOOKS:
            for hook in value.values():
                # Hooks of this package only record operators, which are traced.
                if not getattr(hook, "_lazyxla_traced", False):
                    raise ValueError(_hooks_text(number, name, part, "forward"))
                owner = getattr(hook, "__self__", None)
                yield prefix + attribute, (getattr(hook, "__func__", hook), owner)


def _hooks_text(number: int, name: str, part: nn.Module, kind: str) -> str:
    where = f"'{name}' of layer {number}" if name else f"layer {number}"
    return (
        f"scan_layers calls no hooks of layers, which it traces once for all: {where} "
        f"({type(part).__name__}) has a {kind} hook. Remove it, or call the layers one by one"
    )


def _difference(first: Structure, other: Structure) -> str:
    """What differs, in words; the structures are not equal."""
    for (name, kind), (other_name, other_kind) in zip(first.parts, other.parts, strict=False):
        if name != other_name:
            return f"it has a part '{other_name}' in the place of '{name}'"
        if kind != other_kind:
            return f"{_part(name)} is a {other_kind.__name__}, not a {kind.__name__}"
    if len(first.parts) != len(other.parts):
        return f"it has {len(other.parts)} parts, not {len(first.parts)}"
    missing = {t[0] for t in first.tensors} ^ {t[0] for t in other.tensors}
    if missing:
        return f"only one of them has {_listed(missing)}"
    ours, theirs = next(
        pair for pair in zip(first.tensors, other.tensors, strict=True) if pair[0] != pair[1]
    )
    return (
        f"'{theirs[0]}' has shape {tuple(theirs[1])} and dtype {theirs[2]}, not "
        f"{tuple(ours[1])} and {ours[2]}"
    )


def differing_attributes(first: Attributes, other: Attributes) -> str:
    """Which attributes differ, in words."""
    ours, theirs = dict(first), dict(other)
    names = [n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n)]
    return _listed(names)


def _part(name: str) -> str:
    return f"'{name}'" if name else "it"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names))


def check_devices(layers: Layers, device: torch.device, others: Sequence[torch.Tensor]) -> None:
    """Checks that everything is on one device.

    Raises:
        ValueError: something is not.
    """
    for number, tensors in enumerate(layers.tensors):
        for name, tensor in zip(layers.names, tensors, strict=True):
            if tensor.device != device:
                raise ValueError(
                    f"'{name}' of layer {number} is on {tensor.device}, and the first argument "
                    f"on {device}"
                )
    for tensor in others:
        if tensor.device != device:
            raise ValueError(
                f"an argument of the layers is on {tensor.device}, and the first one on {device}"
            )


def shares_memory(written: Sequence[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """Whether one of the tensors that are written, which are among the others, overlaps with a
    second one."""
    if not written:
        return False
    ranges: dict[int, list[tuple[int, int]]] = {_memory(x)[0]: [] for x in written}
    for x in others:
        storage, begin, end = _memory(x)
        if storage in ranges and begin < end:
            ranges[storage].append((begin, end))
    for of_storage in ranges.values():
        of_storage.sort()
        if any(end > begin for (_, end), (begin, _) in pairwise(of_storage)):
            return True
    return False


def _memory(x: torch.Tensor) -> tuple[int, int, int]:
    """The storage of a tensor, and the range of bytes that it lies in."""
    begin = int(x.storage_offset())
    span = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
    end = begin + span if x.numel() else begin
    return x.untyped_storage().data_ptr(), begin * x.itemsize, end * x.itemsize
