"""Common ways to spread a module over a mesh: data parallel, fully sharded, tensor parallel.

Each only sets how parameters are sharded (:func:`lazyxla.shard`) and where values within the
forward are to be split (:func:`lazyxla.constrain`); the compiler adds the communication. They can
be combined::

    lazyxla.parallelize(model, mesh, {"layers.*.up": lazyxla.ColwiseParallel("model"),
                                      "layers.*.down": lazyxla.RowwiseParallel("model")})
    lazyxla.fully_shard(model, mesh, "data")
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from lazyxla import _C, spmd, torch_plans, untraced
from lazyxla.mesh import Entry, Mesh, check_axes, check_mesh
from lazyxla.runtime import BACKEND

Axes = str | tuple[str, ...]


def data_parallel(module: nn.Module, mesh: Mesh, axis: Axes | None = None) -> nn.Module:
    """Every device gets all parameters, and a part of each batch.

    Tensors that are given to the module's forward are split along their first dimension; gradients
    are summed over the devices by the program.

    Args:
        module: changed in place.
        mesh: the devices.
        axis: the axis or axes of the mesh along which the batch is split; the first one if left
            out.

    Returns:
        The module.

    Raises:
        ValueError: the mesh has no such axis, or one is named twice.
        TypeError: it is no module, or no mesh.
    """
    _check_module(module)
    axes = _axes(mesh, axis)
    tensors = [*module.parameters(), *module.buffers()]
    new = [tensor for tensor in tensors if _spec_on(mesh, tensor) is None]
    spmd.shard_all(new, mesh, [()] * len(new))
    _split_inputs(module, mesh, axes)
    return module


def fully_shard(module: nn.Module, mesh: Mesh, axis: Axes | None = None) -> nn.Module:
    """Every device gets a part of each parameter, and of each batch (ZeRO-3, FSDP).

    A parameter is split along its largest dimension that divides evenly. If none does, every device
    holds the whole parameter; buffers are always whole. Gradients and the optimizer's state are
    split as their parameter is. A layer's output remains split along its first dimension, as the
    batch is, so that the layer's parameters are gathered where they are used. Parameters that
    :func:`parallelize` has sharded over the mesh remain so, and are split along another dimension,
    too.

    Args:
        module: changed in place.
        mesh: the devices.
        axis: the axis or axes of the mesh along which parameters and batches are split; the first
            one if left out.

    Returns:
        The module.

    Raises:
        ValueError: the mesh has no such axis, or one is named twice.
        TypeError: it is no module, or no mesh.
    """
    _check_module(module)
    axes = _axes(mesh, axis)
    tensors, specs = list(module.parameters()), []
    for parameter in tensors:
        spec = _spec_on(mesh, parameter) or (None,) * parameter.dim()
        specs.append(_with_axes(mesh, spec, axes, parameter.shape))
    new = [buffer for buffer in module.buffers() if _spec_on(mesh, buffer) is None]
    spmd.shard_all([*tensors, *new], mesh, [*specs, *[()] * len(new)])
    _split_inputs(module, mesh, axes)
    _split_results(module, mesh, axes)
    return module


@dataclasses.dataclass(frozen=True)
class ColwiseParallel:
    """Splits the output features of a linear layer or an embedding: each device computes some.

    Args:
        axis: of the mesh, along which it is split.
    """

    axis: str = "model"

    def apply(self, module: nn.Module, mesh: Mesh) -> None:
        """Splits a module; :func:`parallelize` calls it.

        Args:
            module: changed in place.
            mesh: the devices.
        """
        _check_style(self, module, mesh)
        if isinstance(module, nn.Embedding):
            spmd.shard(module.weight, mesh, (None, self.axis))
            return
        spmd.shard(module, mesh, (self.axis,))
        module.register_forward_hook(_features(mesh, self.axis).after)


@dataclasses.dataclass(frozen=True)
class RowwiseParallel:
    """Splits the input features of a linear layer, or the rows of an embedding: each device
    computes a part of every sum, and the parts are added.

    Args:
        axis: of the mesh, along which it is split.
    """

    axis: str = "model"

    def apply(self, module: nn.Module, mesh: Mesh) -> None:
        """Splits a module; :func:`parallelize` calls it.

        Args:
            module: changed in place.
            mesh: the devices.
        """
        _check_style(self, module, mesh)
        if isinstance(module, nn.Embedding):
            spmd.shard(module.weight, mesh, (self.axis,))
            return
        spmd.shard(module, mesh, lambda name, p: (None, self.axis) if name == "weight" else ())
        module.register_forward_pre_hook(_features(mesh, self.axis).before, with_kwargs=True)


@dataclasses.dataclass(frozen=True)
class SequenceParallel:
    """Splits a module's output along one dimension, by default the second one: each device computes
    some positions of the sequence. For norms and dropout between layers that are split.

    Args:
        axis: of the mesh, along which it is split.
        dim: the dimension that is split.
        batch_axis: the axis of the mesh along which dimension 0 is split, if the mesh has it; None:
            none.
    """

    axis: str = "model"
    dim: int = 1
    batch_axis: str | None = "data"

    def apply(self, module: nn.Module, mesh: Mesh) -> None:
        """Splits a module; :func:`parallelize` calls it.

        Args:
            module: changed in place.
            mesh: the devices.
        """
        _check_style(self, module, mesh)
        spmd.replicate(module, mesh)
        entries: list[tuple[int, Entry]] = [(self.dim, self.axis)]
        if self.batch_axis in mesh.axis_names:
            entries.insert(0, (0, self.batch_axis))  # if that is `dim`, the later one counts
        least_dims = max(self.dim + 1, -self.dim)
        split = _Split(mesh, tuple(entries), least_dims)
        module.register_forward_hook(split.after)


Style = ColwiseParallel | RowwiseParallel | SequenceParallel


def parallelize(
    module: nn.Module, mesh: Mesh, plan: Mapping[str, Any], axis: str | None = None
) -> nn.Module:
    """Splits the parts of a module, each as the plan says (tensor parallelism).

    Args:
        module: changed in place.
        mesh: the devices.
        plan: how each part is split, by its name, in which ``*`` stands for anything
            (``"layers.*.up"``): an instance of this package's classes, which name an axis, or of
            PyTorch's own (``torch.distributed.tensor.parallel``). The first name that fits counts.
        axis: the axis of the mesh that PyTorch's classes split along. By default the mesh's only
            axis, or the one called "model" or "tp".

    Returns:
        The module.

    Raises:
        ValueError: a name fits no part, the mesh has no such axis, or a placement is neither
            ``Shard`` nor ``Replicate``. Nothing has been changed then.
        TypeError: a part cannot be split in this way, or the plan has something else.
    """
    _check_module(module)
    check_mesh(mesh)
    if not isinstance(plan, Mapping):
        raise TypeError(f"a plan has the names of parts, it is no {type(plan).__name__}")
    for style in plan.values():
        if not isinstance(style, Style) and not torch_plans.is_torch_style(style):
            raise TypeError(f"a plan says how parts are split, not {style!r}")
    unused = set(plan)
    actions: list[torch_plans.Action] = []  # checked before any is taken
    for name, part in module.named_modules():
        for pattern, style in plan.items():
            if fnmatch.fnmatchcase(name, pattern):
                if isinstance(style, Style):
                    _check_style(style, part, mesh)
                    actions.append(functools.partial(style.apply, part, mesh))
                else:
                    along = torch_plans.axis_for(mesh, axis)
                    actions += torch_plans.actions(style, part, mesh, along)
                unused.discard(pattern)
                break
    if unused:
        raise ValueError(f"no part of the module fits {sorted(unused)}")
    for act in actions:
        act()
    return module


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a module, got {type(module).__name__}")


def _check_style(style: Style, module: nn.Module, mesh: Mesh) -> None:
    check_axes(mesh, [style.axis])
    if not isinstance(style, SequenceParallel):
        torch_plans.check_kind(style, module)
    elif style.axis == style.batch_axis and style.dim != 0:
        raise ValueError(f"{style} splits two dimensions along the same axis")


def _axes(mesh: Mesh, axis: Axes | None) -> tuple[str, ...]:
    check_mesh(mesh)
    axis = mesh.axis_names[0] if axis is None else axis
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    check_axes(mesh, axes)
    if not axes or len(set(axes)) != len(axes):
        raise ValueError(f"expected one axis of the mesh, or different ones, got {axis!r}")
    return axes


def _spec_on(mesh: Mesh, tensor: torch.Tensor) -> tuple[Entry, ...] | None:
    """The declared spec of a tensor over this mesh."""
    raw = _C.declared_sharding(tensor) if tensor.device.type == BACKEND else None
    if raw is None or raw.mesh.text != mesh._raw.text:
        return None
    return spmd.spec_of(raw)


def _with_axes(
    mesh: Mesh, spec: tuple[Entry, ...], axes: tuple[str, ...], shape: torch.Size
) -> tuple[Entry, ...]:
    """The spec with the largest dimension that divides split along the axes, too."""
    used = {n for entry in spec if entry for n in ((entry,) if isinstance(entry, str) else entry)}
    if used & set(axes):
        return spec
    count = math.prod(mesh.axis_size(name) for name in axes)
    free = [i for i, size in enumerate(shape) if spec[i] is None and size % count == 0]
    if not free:
        return spec
    largest = max(free, key=lambda i: shape[i])
    entry: Entry = axes[0] if len(axes) == 1 else axes
    return tuple(entry if i == largest else old for i, old in enumerate(spec))


@dataclasses.dataclass(frozen=True)
class _Split:
    """A hook that splits tensors along some dimensions; the partitioner decides on all others."""

    mesh: Mesh
    entries: tuple[tuple[int, Entry], ...]
    least_dims: int = 1

    @untraced.traced
    def before(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, self.split, (args, kwargs))

    @untraced.traced
    def after(self, _module: nn.Module, _args: Any, result: Any) -> Any:
        return tree_map_only(torch.Tensor, self.split, result)

    @untraced.traced
    def split(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != BACKEND or x.dim() < self.least_dims:
            return x
        spec: list[Entry] = ["?"] * x.dim()
        for dim, entry in self.entries:
            spec[dim] = entry
        return spmd.constrain(x, self.mesh, spec)


def _features(mesh: Mesh, axis: str) -> _Split:
    """Splits the last dimension: without that the partitioner might rather split features along the
    sequence, as a :class:`SequenceParallel` part's, and gather weights."""
    return _Split(mesh, ((-1, axis),))


def _split_inputs(module: nn.Module, mesh: Mesh, axes: tuple[str, ...]) -> None:
    split = _Split(mesh, ((0, axes[0] if len(axes) == 1 else axes),))
    module.register_forward_pre_hook(split.before, with_kwargs=True)


def _split_results(module: nn.Module, mesh: Mesh, axes: tuple[str, ...]) -> None:
    """Keeps each layer's output split as the batch is: otherwise the partitioner might gather the
    batch instead of the layer's parameters."""
    split = _Split(mesh, ((0, axes[0] if len(axes) == 1 else axes),), least_dims=2)
    for part in module.modules():
        if next(part.parameters(recurse=False), None) is not None:
            part.register_forward_hook(split.after)
