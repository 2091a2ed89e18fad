"""Devices, waiting and counting: the functions that ``lazyxla`` and ``torch.lazyxla`` share.

A ``device`` argument is an index, a string such as ``"lazyxla:1"``, a ``torch.device`` or None for
the current device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lazyxla import _C, platforms

DeviceLike = int | str | torch.device | None

BACKEND = "lazyxla"


def index_of(device: DeviceLike = None) -> int:
    """The index of a device; None or a device without index means the current one.

    Raises:
        ValueError: the device is of another type.
        IndexError: there is no such device.
    """
    if device is None:
        return _C.current_device()
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != BACKEND:
            raise ValueError(f"expected a {BACKEND} device, got {device}")
        device = -1 if device.index is None else device.index
    return _C.resolve_index(device)


def is_available() -> bool:
    """Whether a plugin is installed to run on. Starts nothing."""
    if _C.initialized():
        return True
    try:
        platforms.resolve()
    except platforms.UNAVAILABLE:
        return False
    return True


def device_count() -> int:
    """How many devices there are. Starts the plugin if only that knows (not on the CPU)."""
    if not _C.initialized():
        platform = platforms.resolve()
        if platform.bound_is_exact:
            return platform.device_bound
    return _C.device_count()


def global_device_count() -> int:
    """How many devices there are in all processes that share them (``torch.distributed`` on TPUs
    and GPUs); else ``device_count()``. Starts the plugin."""
    return _C.all_device_count()


def device(index: int | None = None) -> torch.device:
    """The ``torch.device`` with this index; without one, the current device.

    Args:
        index: of the device, from 0 to ``device_count() - 1``.

    Raises:
        IndexError: there is no such device.
    """
    if index is None:
        index = current_device()
    count = device_count()
    if not 0 <= index < count:
        raise IndexError(f"device index {index} is out of range, there are {count} devices")
    return torch.device(BACKEND, index)


class DeviceProperties(NamedTuple):
    """The properties of a device."""

    device: torch.device
    """The device as PyTorch knows it, with its index."""
    name: str
    """The model, as the plugin calls it: ``"TPU v5e"``."""
    platform: str
    """``"cpu"``, ``"cuda"`` or ``"tpu"``."""
    total_memory: int
    """Bytes that programs may use: the machine's if the device is its CPU, 0 if the plugin does not
    report it."""
    id: int
    """The plugin's number, unique among all processes."""
    process_index: int
    """The process (on TPUs: the host) that owns it."""
    coordinates: tuple[int, ...] | None
    """Its coordinates in the mesh of chips; None for devices that have none."""
    attributes: dict[str, Any]
    """What else the plugin reports, in its own words."""


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    """Properties of a device. Starts the plugin.

    Args:
        device: an index, ``"lazyxla:1"``, a ``torch.device``, or None for the current device.
    """
    index = index_of(device)
    raw = _C.device_description(index)
    try:
        total = _C.memory_info(index)[1]
    except NotImplementedError:
        total = 0
    attributes = dict(raw.attributes)
    coordinates = attributes.pop("coords", None)
    return DeviceProperties(
        device=torch.device(BACKEND, index),
        name=raw.kind,
        platform=platform(),
        total_memory=total,
        id=raw.id,
        process_index=raw.process_index,
        coordinates=None if coordinates is None else tuple(coordinates),
        attributes=attributes,
    )


def devices() -> list[DeviceProperties]:
    """All devices of this process, in order, with their properties. Starts the plugin."""
    return [get_device_properties(index) for index in range(device_count())]


def platform() -> str:
    """The kind of the devices: ``"cpu"``, ``"cuda"`` or ``"tpu"``.

    Starts the plugin only if the settings do not name it.
    """
    if not _C.initialized() and (name := platforms.resolve().name):
        return name
    return _C.platform()


def current_device() -> int:
    """The index of this thread's current device."""
    return _C.current_device()


def set_device(device: DeviceLike) -> None:
    """Makes a device current for this thread.

    Args:
        device: an index, a string such as ``"lazyxla:1"`` or a ``torch.device``.
    """
    _C.exchange_device(index_of(device))


def synchronize(device: DeviceLike = None) -> None:
    """Runs the operators that are recorded for a device, and waits until it has finished.

    Args:
        device: an index, ``"lazyxla:1"``, a ``torch.device``, or None for the current device.
    """
    _C.synchronize(index_of(device))


def sync(wait: bool = False) -> None:
    """Runs the recorded operators, on all devices.

    Args:
        wait: also wait until the devices have finished. Reading a value waits by itself; waiting
            here is for measuring, and for raising errors of the execution here.
    """
    _C.sync(wait)


def counters() -> dict[str, int]:
    """What the backend did since the start or since :func:`reset_counters`.

    Returns:
        A count for each of these:

        - ``nodes_recorded``: operators recorded, reads through views and casts included.
        - ``shape_inferences``: calls of PyTorch's shape inference. Other operators found their
          shapes known, from earlier or from the cache on disk.
        - ``flushes``: graphs run: by :func:`sync`, by reading a value, or by an operator that runs
          on the host.
        - ``cache_hits``: flushes whose program was compiled before.
        - ``lowerings``: graphs lowered to StableHLO, each not seen before.
        - ``nodes_lowered``: nodes in these graphs; dead code is not among them.
        - ``compiles``: programs compiled.
        - ``graphs_cut``: new graphs that became several programs, some of which may be known.
        - ``host_programs``: runs of graphs that are not compiled, or not yet, by PyTorch's kernels.
        - ``programs_loaded``: programs that another process had compiled, loaded from disk.
        - ``programs_dropped``: programs that made room for others, see
          ``settings.max_programs``.
        - ``executions``: programs enqueued on a device.
        - ``uploads``, ``downloads``: copies from the host to a device, and back.
        - ``loader_waits``: batches of a :class:`DeviceLoader` that were not ready when needed.
        - ``fallbacks``: operators run on the host, between two programs, because they have no
          lowering; :func:`fallbacks` has their names.
        - ``host_calls``: operators without a lowering that ran as PyTorch's CPU kernels within a
          program; on the CPU only.
        - ``kernel_calls``: calls of PyTorch's CPU kernels within a program where these are faster
          than what XLA makes of the operator: convolutions; on the CPU only.
        - ``data_dependent``: operators whose result's shape depends on their input's values, such
          as ``nonzero``, and assertions; they read their input.
        - ``captured_steps``: calls of a captured step (``compile(step, capture=True)``) that ran
          its program without its Python code.
        - ``comparisons``: times that processes compared which collective they are in.
    """
    return _C.counters()


def fallbacks() -> dict[str, int]:
    """How often each operator ran on the host because it has no lowering, by its name."""
    return _C.fallbacks()


def reset_counters() -> None:
    """Sets all :func:`counters` and :func:`fallbacks` to zero."""
    _C.reset_counters()


def get_device_name(device: DeviceLike = None) -> str:
    """The model of a device, as the plugin calls it. Starts the plugin.

    Args:
        device: an index, ``"lazyxla:1"``, a ``torch.device``, or None for the current device.
    """
    return _C.device_description(index_of(device)).kind
