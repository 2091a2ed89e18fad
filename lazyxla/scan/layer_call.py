"""A layer as a function of its tensors, the carry and the other arguments, for tracing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lazyxla.scan import structure
from lazyxla.scan.structure import Layers
from lazyxla.scan.tracing import Joint, Signature, trace


@dataclass(frozen=True)
class LayerCall:
    """How a layer is called.

    Attributes:
        names: of the layer's own tensors.
        carry_spec, rest_spec: the trees of the carry and of the other arguments, (args, kwargs).
        rest: the leaves of the latter, None for a tensor.
        places: the indices of those that are tensors.
    """

    names: list[str]
    signature: Signature
    carry_spec: Any
    rest: list[Any]
    places: tuple[int, ...]
    rest_spec: Any

    def __call__(self, layer: nn.Module, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Calls a layer with other tensors than its own.

        Raises:
            TypeError: it returns no next carry.
        """
        first, last = self.signature.layer, self.signature.layer + self.signature.carry
        own = dict(zip(self.names, tensors[:first], strict=True))
        given, rest = tensors[first:last], list(self.rest)
        for place, tensor in zip(self.places, tensors[last:], strict=True):
            rest[place] = tensor
        args, kwargs = pytree.tree_unflatten(rest, self.rest_spec)
        x = pytree.tree_unflatten(list(given), self.carry_spec)
        result = torch.func.functional_call(layer, own, (x, *args), kwargs)
        return _checked(result, given, self.carry_spec)


def trace_equal(
    modules: Sequence[nn.Module], parts: Layers, call: LayerCall, what: Signature
) -> Joint:
    """The first layer's graph. Layers whose attributes differ are traced as well, and compared.

    Raises:
        ValueError: the graphs differ.
        TypeError, NotImplementedError: see `LayerCall` and `trace`.
    """

    def joint_of(layer: nn.Module) -> Joint:
        return trace(lambda tensors: call(layer, tensors), what)

    first = joint_of(modules[0])
    if len(parts.attributes) == 1:
        return first
    text = first.text()
    for number, layer in enumerate(modules[1:], 1):
        if joint_of(layer).text() != text:
            names = structure.differing_attributes(parts.attributes[0], parts.attributes[number])
            raise ValueError(
                f"scan_layers takes equal layers, but layer {number} computes something else than "
                f"layer 0; they differ in {names}"
            )
    return first


def _checked(result: Any, given: Sequence[torch.Tensor], carry_spec: Any) -> list[torch.Tensor]:
    """The leaves of what a layer returned."""
    leaves, spec = pytree.tree_flatten(result)
    if spec != carry_spec:
        raise TypeError(
            "scan_layers: a layer must return what it is given, the next x: it was given "
            f"{_shown(given, carry_spec)}, and returned {_shown(leaves, spec)}"
        )
    for before, after in zip(given, leaves, strict=True):
        same = isinstance(after, torch.Tensor) and (after.shape, after.dtype) == (
            before.shape,
            before.dtype,
        )
        if not same:
            raise TypeError(
                "scan_layers: a layer must return tensors of the shapes and dtypes that it is "
                f"given: it was given {_shown_one(before)}, and returned {_shown_one(after)}"
            )
    return leaves


def _shown(leaves: Sequence[Any], spec: Any) -> str:
    return str(pytree.tree_unflatten([_Shown(leaf) for leaf in leaves], spec))


class _Shown:
    def __init__(self, value: Any) -> None:
        self._text = _shown_one(value)

    def __repr__(self) -> str:
        return self._text


def _shown_one(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
