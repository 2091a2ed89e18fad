"""Meshes: grids of devices with named axes, and specs, which name axes for a tensor's dimensions.

What they are for, and what a *spec* is: :mod:`lazyxla.spmd`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from torch.distributed import DeviceMesh

from lazyxla import _C, untraced
from lazyxla.runtime import (
    BACKEND,
    DeviceLike,
    device_count,
    global_device_count,
    index_of,
)

Entry = str | tuple[str, ...] | None
Spec = Sequence[Entry]


class Mesh:
    """A grid of devices with named axes.

    Args:
        shape: how long each axis is.
        axis_names: their names, all different.
        devices: which devices, row by row (the last axis varies fastest): indices or
            ``torch.device``. Left out, the first ones that there are. Where processes share their
            devices, an index counts those of all processes, rank by rank, and a ``torch.device`` is
            one of this process's. While programs are captured (:func:`lazyxla.aot.capture`) the
            devices are those of the capture's topology.

    Raises:
        ValueError: the shape fits neither the names nor the devices, or a name or device comes
            twice.
        IndexError: there is no such device.
        TypeError: the names are no sequence of strings, or the shape is none of integers.
    """

    def __init__(
        self,
        shape: Sequence[int],
        axis_names: Sequence[str],
        devices: Iterable[DeviceLike] | None = None,
    ) -> None:
        self.shape = tuple(operator.index(size) for size in shape)
        self.axis_names = tuple(axis_names)
        if isinstance(axis_names, str) or not all(isinstance(n, str) for n in self.axis_names):
            raise TypeError(f"axis_names must be a sequence of strings, got {axis_names!r}")
        if not self.shape or len(self.shape) != len(self.axis_names):
            raise ValueError(
                f"a mesh of shape {self.shape} needs a name for each axis, got {self.axis_names}"
            )
        if len(set(self.axis_names)) != len(self.axis_names):
            raise ValueError(f"the axes of a mesh have different names, got {self.axis_names}")
        if not all(name.isidentifier() for name in self.axis_names):
            raise ValueError(f"the name of an axis must be an identifier, got {self.axis_names}")
        if min(self.shape) < 1:
            raise ValueError(f"an axis has at least one device, got the shape {self.shape}")
        self.devices = self._indices(devices)
        self._is_of_topology = bool(_C.captured_devices()) and (
            max(self.devices) >= global_device_count()
        )
        self._raw = _C.make_mesh(list(zip(self.axis_names, self.shape)), list(self.devices))

    @property
    def jax_mesh(self) -> Any:
        """The same axes for JAX, a ``jax.sharding.AbstractMesh``: for ``jax.shard_map`` in a
        function that :func:`lazyxla.call_jax` calls."""
        from jax.sharding import AbstractMesh

        return AbstractMesh(self.shape, self.axis_names)

    def _indices(self, devices: Iterable[DeviceLike] | None) -> tuple[int, ...]:
        captured = _C.captured_devices()
        size, available = math.prod(self.shape), captured or global_device_count()
        if devices is None:
            if size > available:
                raise ValueError(
                    f"a mesh of shape {self.shape} needs {size} devices, and there are {available}"
                )
            return tuple(range(size))
        devices = tuple(devices)
        if any(isinstance(device, int) and device < 0 for device in devices):
            raise IndexError(f"there is no device of a negative index, got {devices}")
        first = 0 if captured else _C.first_device()
        counts_all = captured or available > device_count()
        indices = tuple(
            device if counts_all and isinstance(device, int) else first + index_of(device)
            for device in devices
        )
        if any(not 0 <= index < available for index in indices):
            raise IndexError(f"there are {available} devices, got {indices}")
        if len(indices) != size:
            raise ValueError(
                f"a mesh of shape {self.shape} needs {size} devices, got {len(indices)}"
            )
        if len(set(indices)) != size:
            raise ValueError(f"a device can be in a mesh only once, got {indices}")
        return indices

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh) -> Mesh:
        """The mesh of a ``torch.distributed.DeviceMesh`` whose ranks are devices of this process.

        Args:
            device_mesh: on ``"lazyxla"``, with a name for each dimension.

        Raises:
            ValueError: its dimensions have no names, or it is on another kind of device.
            IndexError: a rank is no device of this process.
            TypeError: it is no ``DeviceMesh``.
        """
        if not isinstance(device_mesh, DeviceMesh):
            raise TypeError(f"expected a DeviceMesh, got {type(device_mesh).__name__}")
        if device_mesh.device_type != BACKEND:
            raise ValueError(
                f"expected a DeviceMesh on {BACKEND!r}, got one on {device_mesh.device_type!r}"
            )
        names = device_mesh.mesh_dim_names
        if names is None:
            raise ValueError("a DeviceMesh needs mesh_dim_names, which name the axes of a Mesh")
        return cls(device_mesh.mesh.shape, names, device_mesh.mesh.flatten().tolist())

    @untraced.constant
    def _sharding_text(self, spec: Spec, rank: int) -> str:
        """The sharding of a spec for tensors of this rank, as the operator takes it."""
        text: str = sharding_of_spec(self, spec, rank, may_be_open=True).text
        return text

    @property
    def size(self) -> int:
        """How many devices it has."""
        return len(self.devices)

    def axis_size(self, name: str) -> int:
        """How long an axis is.

        Args:
            name: of an axis of the mesh.

        Raises:
            ValueError: the mesh has no such axis.
        """
        check_axes(self, [name])
        return self.shape[self.axis_names.index(name)]

    def __repr__(self) -> str:
        axes = ", ".join(f"{n}={s}" for n, s in zip(self.axis_names, self.shape))
        return f"Mesh({axes}; devices {list(self.devices)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Mesh, (self.shape, self.axis_names, self.devices)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self._raw.text == other._raw.text

    def __hash__(self) -> int:
        return hash(self._raw.text)


def sharding_of_spec(mesh: Mesh, spec: Spec, rank: int, may_be_open: bool = False) -> Any:
    """The interned sharding of a spec for a tensor of this rank."""
    check_mesh(mesh)
    if isinstance(spec, str) or not isinstance(spec, Sequence):
        raise TypeError(f"a spec is a tuple with an entry for each dimension, got {spec!r}")
    if len(spec) > rank:
        raise ValueError(
            f"the spec {tuple(spec)} has {len(spec)} entries, and the tensor {rank} dimensions"
        )
    open_ = [entry == "?" and may_be_open for entry in spec] + [False] * (rank - len(spec))
    axes = [[] if o else _axes_of(mesh, e, spec) for e, o in zip(spec, open_)]
    used = [axis for of_dimension in axes for axis in of_dimension]
    if len(set(used)) != len(used):
        raise ValueError(f"the spec {tuple(spec)} splits along an axis twice")
    return _C.make_sharding(mesh._raw, axes + [[]] * (rank - len(axes)), open_)


@untraced.traced
def check_mesh(mesh: Mesh) -> None:
    if not isinstance(mesh, Mesh):
        raise TypeError(f"expected a lazyxla.Mesh, got {type(mesh).__name__}")
    if mesh._is_of_topology and not _C.captured_devices():
        raise ValueError(
            f"a mesh of shape {mesh.shape} was made of a topology's devices, which are not there; "
            "it can be used while programs are captured only"
        )


def check_axes(mesh: Mesh, names: Iterable[object]) -> None:
    check_mesh(mesh)
    for name in names:
        if name not in mesh.axis_names:
            raise ValueError(f"the mesh has no axis {name!r}, but {mesh.axis_names}")


def _axes_of(mesh: Mesh, entry: Entry, spec: Spec) -> list[int]:
    if not isinstance(entry, (str, tuple, list, type(None))):
        raise TypeError(f"the spec {tuple(spec)} has an entry that names no axis: {entry!r}")
    names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
    for name in names:
        if name not in mesh.axis_names:
            raise ValueError(
                f"the spec {tuple(spec)} names the axis {name!r}, and the mesh has "
                f"{mesh.axis_names}"
            )
    return [mesh.axis_names.index(name) for name in names]
