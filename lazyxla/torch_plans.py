"""PyTorch's plans of tensor parallelism, for tensors that stay global.

``torch.distributed.tensor.parallel`` describes how the inputs and outputs of a part of a module are
placed along one axis of a mesh: ``Shard(dim)`` or ``Replicate()``. There each process computes with
local tensors, which are exchanged where the placements differ. Here every tensor is global, and the
same placements are constraints where values are split or gathered: the compiler adds the exchange,
and a plan never changes a value. ``use_local_output`` has no effect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lazyxla import spmd, untraced
from lazyxla.mesh import Entry, Mesh
from lazyxla.runtime import BACKEND

_AXES = ("model", "tp")
"""The default name of an axis for tensor parallelism."""


def is_torch_style(style: object) -> bool:
    """Whether it is one of ``torch.distributed.tensor.parallel``."""
    return any(
        kind.__module__ == "torch.distributed.tensor.parallel.style" for kind in type(style).__mro__
    )


def axis_for(mesh: Mesh, axis: str | None) -> str:
    """The axis that PyTorch's plans, which name none, are for.

    Raises:
        ValueError: the mesh has no such axis, or several and none is called "model" or "tp".
    """
    if axis is not None:
        if axis not in mesh.axis_names:
            raise ValueError(f"the mesh has no axis {axis!r}, but {mesh.axis_names}")
        return axis
    if len(mesh.axis_names) == 1:
        return mesh.axis_names[0]
    for name in _AXES:
        if name in mesh.axis_names:
            return name
    raise ValueError(
        f"PyTorch's plans name no axis of the mesh, which has {mesh.axis_names}: give it as "
        'parallelize(..., axis="...")'
    )


def apply(style: Any, module: nn.Module, mesh: Mesh, axis: str) -> None:
    """Spreads a module's parameters, and constrains what it is given and what it yields, as one of
    PyTorch's styles says.

    Raises:
        TypeError: the module is of a kind that the style is not for, or the style is none of
            PyTorch's own.
        ValueError: a placement is neither ``Shard`` nor ``Replicate``.
    """
    from torch.distributed.tensor import Replicate, Shard, parallel

    is_embedding = isinstance(module, nn.Embedding)
    if isinstance(style, parallel.ColwiseParallel):
        _shard_weights(style, module, mesh, (None, axis) if is_embedding else (axis,))
        _before(module, mesh, axis, style.input_layouts, (Replicate(),))
        _after(module, mesh, axis, (Shard(-1),), style.output_layouts)
    elif isinstance(style, parallel.RowwiseParallel):
        _shard_weights(style, module, mesh, (axis,) if is_embedding else (None, axis))
        if not is_embedding:  # indices are the same everywhere
            _before(module, mesh, axis, style.input_layouts, (Shard(-1),))
        _after(module, mesh, axis, (Replicate(),), style.output_layouts)
    elif isinstance(style, parallel.SequenceParallel):
        spmd.replicate(module, mesh)
        _before(module, mesh, axis, (Replicate(),), style.sequence_sharding)
        _after(module, mesh, axis, (Replicate(),), style.sequence_sharding)
    elif isinstance(style, parallel.PrepareModuleInputOutput):
        apply(style.prepare_module_input, module, mesh, axis)
        apply(style.prepare_module_output, module, mesh, axis)
    elif isinstance(style, parallel.PrepareModuleInput):
        by_name = style.input_kwarg_layouts, style.desired_input_kwarg_layouts
        given, wanted = style.input_layouts or (), style.desired_input_layouts or ()
        _before(module, mesh, axis, given, wanted, *by_name)
    elif isinstance(style, parallel.PrepareModuleOutput):
        _after(module, mesh, axis, style.output_layouts, style.desired_output_layouts)
    else:
        raise TypeError(f"{type(style).__name__} is none of PyTorch's plans that lazyxla knows")


def _shard_weights(style: Any, module: nn.Module, mesh: Mesh, spec: tuple[Entry, ...]) -> None:
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        kind, name = type(module).__name__, type(style).__name__
        raise TypeError(f"{name} is for Linear and Embedding, not for {kind}")
    # A bias has the features that are yielded: split with them, or whole.
    spmd.shard(module, mesh, lambda _name, parameter: spec[: parameter.dim()])


def _before(
    module: nn.Module,
    mesh: Mesh,
    axis: str,
    given: Sequence[Any],
    wanted: Sequence[Any],
    given_by_name: Mapping[str, Any] | None = None,
    wanted_by_name: Mapping[str, Any] | None = None,
) -> None:
    """Constrains arguments that are to be split, or are split and to be gathered."""
    changes = tuple(_change(axis, g, w) for g, w in zip(given, wanted, strict=True))
    named, wanted_by_name = {}, wanted_by_name or {}
    for name, placement in (given_by_name or {}).items():
        named[name] = _change(axis, placement, wanted_by_name.get(name))
    if any([*changes, *named.values()]):
        placing = _Placing(mesh, changes, tuple(named.items()))
        module.register_forward_pre_hook(placing.arguments, with_kwargs=True)


def _after(
    module: nn.Module, mesh: Mesh, axis: str, given: Sequence[Any], wanted: Sequence[Any]
) -> None:
    """Constrains results, as `_before` does arguments."""
    changes = tuple(_change(axis, g, w) for g, w in zip(given, wanted, strict=True))
    if any(changes):
        module.register_forward_hook(_Placing(mesh, changes).results)


class _Change(NamedTuple):
    """A dimension, and the axis that it is split along from now on; None: it is whole."""

    dim: int
    entry: Entry


def _change(axis: str, given: Any, wanted: Any) -> _Change | None:
    """The change that a value of one placement needs for the other; None: nothing.

    A value that remains split is marked, too. Otherwise the partitioner might split it as its
    neighbours are, such as a layer's features along the sequence, and gather weights instead.
    """
    from torch.distributed.tensor import Replicate, Shard

    placements = [
        p[0] if isinstance(p, (tuple, list)) and len(p) == 1 else p for p in (given, wanted)
    ]
    for placement in placements:
        if placement is not None and type(placement) not in (Shard, Replicate):
            raise ValueError(f"a plan's placements are Shard and Replicate, not {placement!r}")
    given, wanted = placements
    if isinstance(wanted, Shard):
        return _Change(wanted.dim, axis)
    return _Change(given.dim, None) if wanted is not None and isinstance(given, Shard) else None


@dataclasses.dataclass(frozen=True)
class _Placing:
    """Hooks that constrain values, each by its position or name."""

    mesh: Mesh
    changes: tuple[_Change | None, ...]
    by_name: tuple[tuple[str, _Change | None], ...] = ()

    @untraced.traced
    def arguments(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        placed = [self.place(x, c) for x, c in zip(args, self.changes)]
        changes = dict(self.by_name)
        named = {name: self.place(x, changes.get(name)) for name, x in kwargs.items()}
        return (*placed, *args[len(placed) :]), named

    @untraced.traced
    def results(self, _module: nn.Module, _args: Any, result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            return self.place(result, self.changes[0])
        placed = [self.place(x, c) for x, c in zip(result, self.changes)]
        return type(result)([*placed, *result[len(placed) :]])

    @untraced.traced
    def place(self, x: Any, change: _Change | None) -> Any:
        if change is None or not isinstance(x, torch.Tensor) or x.device.type != BACKEND:
            return x
        if not -x.dim() <= change.dim < x.dim():
            raise ValueError(
                f"a plan splits dimension {change.dim} of a tensor of shape {tuple(x.shape)}"
            )
        spec: list[Entry] = ["?"] * x.dim()
        spec[change.dim] = change.entry
        return spmd.constrain(x, self.mesh, spec)
