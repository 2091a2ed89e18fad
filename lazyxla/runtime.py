"""Devices, waiting and memory: the functions that ``lazyxla`` and ``torch.lazyxla`` share.

A ``device`` argument is an index, a string such as ``"lazyxla:1"``, a ``torch.device`` or None for
the current device.
"""

from __future__ import annotations

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
    """Whether a plugin is there to run on. Starts nothing."""
    if _C.initialized():
        return True
    try:
        platforms.resolve()
    except platforms.UNAVAILABLE:
        return False
    return True


def device_count() -> int:
    """How many devices there are. Starts the plugin if only that can tell (not on the CPU)."""
    if not _C.initialized():
        platform = platforms.resolve()
        if platform.bound_is_exact:
            return platform.device_bound
    return _C.device_count()


def device(index: int | None = None) -> torch.device:
    """The ``torch.device`` with this index; without one, the current device.

    Raises:
        IndexError: there is no such device.
    """
    if index is None:
        index = current_device()
    count = device_count()
    if not 0 <= index < count:
        raise IndexError(f"device index {index} is out of range, there are {count} devices")
    return torch.device(BACKEND, index)


def devices() -> list[torch.device]:
    """All devices, in order."""
    return [torch.device(BACKEND, index) for index in range(device_count())]


def platform() -> str:
    """What the devices are: ``"cpu"``, ``"cuda"`` or ``"tpu"``. Starts nothing if it is plain."""
    if not _C.initialized() and (name := platforms.resolve().name):
        return name
    return _C.platform()


def current_device() -> int:
    """The index of this thread's current device."""
    return _C.current_device()


def set_device(device: DeviceLike) -> None:
    """Makes a device current for this thread."""
    _C.exchange_device(index_of(device))


def synchronize(device: DeviceLike = None) -> None:
    """Runs what is recorded for a device and waits until it has finished."""
    _C.synchronize(index_of(device))


def sync(wait: bool = False) -> None:
    """Runs what is recorded, on all devices.

    Args:
        wait: also wait until the devices have finished. Reading a value waits by itself; this is
            for measuring, and for having errors of the execution raised here.
    """
    _C.sync(wait, _C.Cause.SYNC)


def counters() -> dict[str, int]:
    """What the backend did since the start or the last reset: compiles, executions, ..."""
    return _C.counters()


def fallbacks() -> dict[str, int]:
    """How often each operator ran on the host, because it has no lowering."""
    return _C.fallbacks()


def reset_counters() -> None:
    """Sets all :func:`counters` and :func:`fallbacks` to zero."""
    _C.reset_counters()


def get_device_name(device: DeviceLike = None) -> str:
    """The model of a device, as the plugin calls it. Starts the plugin."""
    return _C.device_kind(index_of(device))


def memory_stats(device: DeviceLike = None) -> dict[str, int]:
    """Memory of a device, in bytes.

    ``allocated_bytes.all.current`` and ``.peak`` and ``live_buffers`` count the arrays that
    lazyxla holds; temporary memory of running programs is not in them. What the plugin's own
    allocator tells, if anything, is under ``plugin.``. Empty before the first use of a device.
    """
    return _C.memory_stats(index_of(device)) if _C.initialized() else {}


def memory_allocated(device: DeviceLike = None) -> int:
    """Bytes that the arrays on a device occupy."""
    return memory_stats(device).get("allocated_bytes.all.current", 0)


def max_memory_allocated(device: DeviceLike = None) -> int:
    """The most that :func:`memory_allocated` was since the start or the last reset."""
    return memory_stats(device).get("allocated_bytes.all.peak", 0)


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Starts :func:`max_memory_allocated` anew."""
    if _C.initialized():
        _C.reset_peak_memory_stats(index_of(device))
