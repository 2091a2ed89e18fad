"""PyTorch's plans of tensor parallelism, for tensors that stay global.

``torch.distributed.tensor.parallel`` describes how the inputs and outputs of a part of a module are
placed along one axis of a mesh: ``Shard(dim)`` or ``Replicate()``. There each process computes with
local tensors, which are exchanged where the placements differ. Here every tensor is global, and the
same placements are constraints where values are split or gathered: the compiler adds the exchange,
and a plan never changes a value. ``use_local_output`` has no effect.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lazyxla import spmd, untraced
from lazyxla.mesh import Entry, Mesh, check_axes
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
        check_axes(mesh, [axis])
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


Action = Callable[[], object]
"""A change of a module that is checked, and still to be made."""


def actions(style: Any, module: nn.Module, mesh: Mesh, axis: str) -> list[Action]:
    """What spreads a module's parameters, and constrains what it is given and what it yields, as
    one of PyTorch's styles says.

    Raises:
        TypeError: the module is of a kind that the style is not for, or the style is none of
            PyTorch's own.
        ValueError: a placement is neither ``Shard`` nor ``Replicate``.
    """
    from torch.distributed.tensor import Replicate, Shard, parallel

    before = functools.partial(_before, module, mesh, axis)
    after = functools.partial(_after, module, mesh, axis)
    is_embedding = isinstance(module, nn.Embedding)
    if isinstance(style, parallel.ColwiseParallel):
        return [
            *_shard_weights(style, module, mesh, (None, axis) if is_embedding else (axis,)),
            *before(style.input_layouts, (Replicate(),)),
            *after((Shard(-1),), style.output_layouts),
        ]
    if isinstance(style, parallel.RowwiseParallel):
        # An embedding's indices are the same everywhere.
        return [
            *_shard_weights(style, module, mesh, (axis,) if is_embedding else (None, axis)),
            *([] if is_embedding else before(style.input_layouts, (Shard(-1),))),
            *after((Replicate(),), style.output_layouts),
        ]
    if isinstance(style, parallel.SequenceParallel):
        return [
            functools.partial(spmd.replicate, module, mesh),
            *before((Replicate(),), style.sequence_sharding),
            *after((Replicate(),), style.sequence_sharding),
        ]
    if isinstance(style, parallel.PrepareModuleInputOutput):
        parts = style.prepare_module_input, style.prepare_module_output
        return [action for part in parts for action in actions(part, module, mesh, axis)]
    if isinstance(style, parallel.PrepareModuleInput):
        by_name = style.input_kwarg_layouts, style.desired_input_kwarg_layouts
        return before(style.input_layouts or (), style.desired_input_layouts or (), *by_name)
    if isinstance(style, parallel.PrepareModuleOutput):
        return after(style.output_layouts, style.desired_output_layouts)
    raise TypeError(f"{type(style).__name__} is none of PyTorch's plans that lazyxla knows")


def _shard_weights(
    style: Any, module: nn.Module, mesh: Mesh, spec: tuple[Entry, ...]
) -> list[Action]:
    check_kind(style, module)
    # A bias has the features that are yielded: split with them, or whole.
    return [functools.partial(spmd.shard, module, mesh, lambda _name, x: spec[: x.dim()])]


def check_kind(style: object, module: nn.Module) -> None:
    """Raises a TypeError if the module has no features to split."""
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        kind, name = type(module).__name__, type(style).__name__
        raise TypeError(f"{name} is for Linear and Embedding, not for {kind}")


def _before(
    module: nn.Module,
    mesh: Mesh,
    axis: str,
    given: Sequence[Any],
    wanted: Sequence[Any],
    given_by_name: Mapping[str, Any] | None = None,
    wanted_by_name: Mapping[str, Any] | None = None,
) -> list[Action]:
    """Constrains arguments that are to be split, or are split and to be gathered."""
    changes = tuple(_change(axis, g, w) for g, w in zip(given, wanted, strict=True))
    named, wanted_by_name = {}, wanted_by_name or {}
    for name, placement in (given_by_name or {}).items():
        named[name] = _change(axis, placement, wanted_by_name.get(name))
    if not any([*changes, *named.values()]):
        return []
    placing = _Placing(mesh, changes, tuple(named.items()))
    register = module.register_forward_pre_hook
    return [functools.partial(register, placing.arguments, with_kwargs=True)]


def _after(
    module: nn.Module, mesh: Mesh, axis: str, given: Sequence[Any], wanted: Sequence[Any]
) -> list[Action]:
    """Constrains results, as `_before` does arguments."""
    changes = tuple(_change(axis, g, w) for g, w in zip(given, wanted, strict=True))
    if not any(changes):
        return []
    return [functools.partial(module.register_forward_hook, _Placing(mesh, changes).results)]


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
        if not isinstance(result, (tuple, list)):
            return result
        placed = [self.place(x, c) for x, c in zip(result, self.changes)]
        values = [*placed, *result[len(placed) :]]
        # A named tuple takes its fields one by one.
        return type(result)(*values) if hasattr(result, "_fields") else type(result)(values)

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
