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
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from lazyxla import _C, spmd, torch_plans, untraced
from lazyxla.mesh import Entry, Mesh
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
        ValueError: the mesh has no such axis.
    """
    axes = _axes(mesh, axis)
    for tensor in _tensors(module):
        if _spec_on(mesh, tensor) is None:
            spmd.replicate(tensor, mesh)
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
        ValueError: the mesh has no such axis.
    """
    axes = _axes(mesh, axis)
    for parameter in module.parameters():
        spec = _spec_on(mesh, parameter) or (None,) * parameter.dim()
        spmd.shard(parameter, mesh, _with_axes(mesh, spec, axes, parameter.shape))
    for buffer in module.buffers():
        if _spec_on(mesh, buffer) is None:
            spmd.replicate(buffer, mesh)
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
        if isinstance(module, nn.Embedding):
            spmd.shard(module.weight, mesh, (None, self.axis))
            return
        _check_linear(self, module)
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
        if isinstance(module, nn.Embedding):
            spmd.shard(module.weight, mesh, (self.axis,))
            return
        _check_linear(self, module)
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
        spmd.replicate(module, mesh)
        entries: list[tuple[int, Entry]] = [(self.dim, self.axis)]
        if self.batch_axis in mesh.axis_names:
            entries.append((0, self.batch_axis))
        split = _Split(mesh, tuple(entries), least_dims=self.dim + 1)
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
            ``Shard`` nor ``Replicate``.
        TypeError: a part cannot be split in this way, or the plan has something else.
    """
    for style in plan.values():
        if not isinstance(style, Style) and not torch_plans.is_torch_style(style):
            raise TypeError(f"a plan says how parts are split, not {style!r}")
    unused = set(plan)
    for name, part in module.named_modules():
        for pattern, style in plan.items():
            if fnmatch.fnmatchcase(name, pattern):
                if isinstance(style, Style):
                    style.apply(part, mesh)
                else:
                    torch_plans.apply(style, part, mesh, torch_plans.axis_for(mesh, axis))
                unused.discard(pattern)
                break
    if unused:
        raise ValueError(f"no part of the module fits {sorted(unused)}")
    return module


def _check_linear(style: Style, module: nn.Module) -> None:
    if not isinstance(module, nn.Linear):
        kind, name = type(module).__name__, type(style).__name__
        raise TypeError(f"{name} is for Linear and Embedding, not for {kind}")


def _axes(mesh: Mesh, axis: Axes | None) -> tuple[str, ...]:
    axes = (mesh.axis_names[0],) if axis is None else (axis,) if isinstance(axis, str) else axis
    for name in axes:
        if name not in mesh.axis_names:
            raise ValueError(f"the mesh has no axis {name!r}, but {mesh.axis_names}")
    return axes


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


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
