"""What equal layers are: modules of the same parts, with tensors of the same shapes and dtypes.

The other attributes of a module may decide what its forward does (a dropout's probability) or may
not (a layer's number). Where attributes differ, the layers are traced, and their graphs compared:
see tracing.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type, FunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
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
    """An object that is equal to itself only. It is kept alive, so that no other takes its id."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


class Layers(NamedTuple):
    """Equal layers. `tensors` has a list of parameters and buffers for each layer."""

    structure: Structure
    attributes: tuple[Attributes, ...]
    tensors: list[list[torch.Tensor]]
    parameters: int
    """How many of a layer's tensors are parameters; these come first."""

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
    found = [_read_one(number, layer) for number, layer in enumerate(modules)]
    first = found[0][0]
    for number, (structure, _, _, _) in enumerate(found):
        if structure != first:
            raise ValueError(
                f"scan_layers takes equal layers, but layer {number} differs from layer 0: "
                + _difference(first, structure)
            )
    attributes = tuple(of_layer for _, of_layer, _, _ in found)
    if all(of_layer == attributes[0] for of_layer in attributes):
        attributes = attributes[:1]
    return modules, Layers(first, attributes, [t for _, _, t, _ in found], found[0][3])


def _read_one(
    number: int, layer: nn.Module
) -> tuple[Structure, Attributes, list[torch.Tensor], int]:
    parts = list(layer.named_modules())
    named: list[tuple[str, torch.Tensor]] = list(layer.named_parameters())
    parameters = len(named)
    named += layer.named_buffers()
    structure = Structure(
        tuple((name, type(part)) for name, part in parts),
        tuple((name, tensor.shape, tensor.dtype) for name, tensor in named),
    )
    attributes = tuple(a for name, part in parts for a in _attributes(number, name, part))
    return structure, attributes, [tensor for _, tensor in named], parameters


def _attributes(number: int, name: str, part: nn.Module) -> Iterator[tuple[str, Any]]:
    prefix = f"{name}." if name else ""
    for attribute, value in vars(part).items():
        if attribute not in _OF_EVERY_MODULE:
            yield prefix + attribute, comparable(value)
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


def comparable(value: Any) -> Any:
    """Something that is equal for equal values and can be hashed."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, (list, tuple)):
        return kind, tuple(map(comparable, value))
    return Same(value)


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
