"""What the recorder hands to the lowering on a cache miss: plain data, built in C++, never changed.

A program is a list of nodes in execution order. Values are numbered: the inputs are 0..n-1, then
every node's outputs follow consecutively. Numbers that reach an operator (a `Scalar` or `float`
argument, a 0-dim CPU tensor) are slots: a slot is a constant until its value changes between two
runs, and an element of a runtime input from then on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

Argument = Any
"""Ref, Slot, int, bool, str, None, torch.dtype, torch.device, torch.layout, torch.memory_format,
Geometry, or a list of those. Arguments of schema type `float` and `Scalar` are always slots."""


class Ref(int):
    """The number of a value."""

    __slots__ = ()


class Slot(int):
    """The number of a scalar slot."""

    __slots__ = ()


class TensorSpec(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]


class Geometry(NamedTuple):
    """The layout of a tensor's elements in its storage; strides and offset count elements."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class SlotSpec(NamedTuple):
    """`wrapped`: a Python number, which takes part in type promotion by its category only.

    A complex number has two: its real part, with the dtype of the number, and its imaginary part,
    a float64.
    """

    value: int | float | bool | complex
    dtype: torch.dtype
    wrapped: bool
    variable: bool


class Settings(NamedTuple):
    """What an operator depends on besides its arguments, as it was when the call was recorded."""

    default_dtype: torch.dtype
    precision: int
    """Of float32 matmuls: the position in PRECISIONS."""

    @classmethod
    def current(cls) -> Settings:
        """Torch's current settings."""
        from lazyxla import _C

        return cls(torch.get_default_dtype(), _C.matmul_precision())

    @property
    def matmul_precision(self) -> str:
        """The name from torch.get_float32_matmul_precision()."""
        return PRECISIONS[self.precision]


PRECISIONS = ("highest", "high", "medium")  # in the order of at::Float32MatmulPrecision


class Node(NamedTuple):
    """One operator call; `args` are all arguments in schema order, defaults filled in. Without
    `settings` those of the node around it hold, or else torch's own."""

    op: str
    args: tuple[Argument, ...]
    outputs: tuple[TensorSpec, ...]
    rng: tuple[Slot, Slot] | None = None
    settings: Settings | None = None


AxisPart = tuple[str, int, int]
"""The name of a mesh's axis, how many devices' worth of it come before the part, its size."""

PartitionSpec = tuple[tuple[AxisPart, ...], ...]
"""Along which axes each dimension of a value is split, outermost first."""


class Partition(NamedTuple):
    """How a program is spread over the devices of a mesh. None among the `results`: as the
    partitioner likes."""

    axes: tuple[tuple[str, int], ...]
    inputs: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec | None, ...]


ReplicaGroups = tuple[tuple[int, ...], ...]
"""Which replicas of a program are together: of each group its replicas, by member."""


class Program(NamedTuple):
    """`donations`: number of an input -> position in `outputs` that takes over its buffer.
    `partition`: of a program for many devices.
    `groups`: of a program whose replicas are several processes': by the name of a process group,
    which replicas it and those like it are."""

    inputs: list[TensorSpec]
    nodes: list[Node]
    outputs: list[Ref]
    slots: list[SlotSpec]
    donations: dict[int, int]
    partition: Partition | None = None
    groups: Mapping[str, ReplicaGroups] = {}


class Target(NamedTuple):
    """What a program is lowered for."""

    platform: str
    """"cpu", "cuda" or "tpu"."""
    device_kind: str = ""
    """The model of the devices as the plugin calls it ("TPU v5 lite"), if known."""
    compute_capability: tuple[int, int] | None = None
    """Of a CUDA device, if known."""
    stablehlo_version: str | None = None
    """As the plugin reports it ("1.13.0"); None means jaxlib's own version."""
    host_calls: bool = True
    """Whether PyTorch's kernels can be called. If not, what has a rule for an accelerator only is
    lowered by that."""
    composites: bool = False
    """Whether some operators of graphs keep their names (composites.py)."""
    any_sizes: bool = False
    """Whether the program is to be the same for all sizes, as far as it is valid (see
    dynamic_shapes.py), rather than the fastest for its own."""

    @classmethod
    def of(cls, platform: str, device: Any, stablehlo_version: Sequence[int] | None) -> Target:
        """A platform's device, a _C.DeviceDescription."""
        capability = device.attributes.get("compute_capability")
        if capability is not None:
            major, minor = (int(number) for number in capability.split("."))
            capability = (major, minor)
        version = None if stablehlo_version is None else ".".join(map(str, stablehlo_version))
        return cls(platform, device.kind, capability, version)


class Lowered(NamedTuple):
    """`static_slots`: those whose value a rule has built in; another value is another program."""

    artifact: bytes
    static_slots: tuple[int, ...]
