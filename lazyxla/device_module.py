"""``torch.lazyxla``: what PyTorch's generic code expects of a device module.

It has the names of ``torch.cuda`` wherever they mean something here. ``torch.accelerator``,
``torch.autocast``, ``torch.utils.checkpoint``, ``torch.random.fork_rng``, ``torch.save`` and
``torch.load``, ``DataLoader`` and the distributed packages find their device through it. In
programs, use ``lazyxla`` itself: it is shorter.
"""

from __future__ import annotations

from typing import Any

import torch

from lazyxla import _C
from lazyxla.memory import (
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
)
from lazyxla.random import (
    default_generator,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from lazyxla.runtime import (
    BACKEND,
    DeviceLike,
    DeviceProperties,
    current_device,
    device_count,
    get_device_name,
    get_device_properties,
    index_of,
    is_available,
    set_device,
    synchronize,
)

__all__ = [
    "DeviceProperties",
    "Event",
    "Stream",
    "StreamContext",
    "current_device",
    "current_stream",
    "default_generator",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "exchange_device",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "get_stream_from_external",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "maybe_exchange_device",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
]

# torch.utils.checkpoint saves a device's generator only if its module reports to be initialized.
# Our generators need no device, so there is always something to save.
_initialized = True

_OF_INDUCTOR = ("Scheduling", "PythonWrapperCodegen", "CppWrapperCodegen", "WrapperFxCodegen")


def __getattr__(name: str) -> Any:
    """What Inductor needs of a device module. Not made earlier, since importing it takes
    seconds."""
    if name in _OF_INDUCTOR:
        from lazyxla.dynamo import inductor

        return getattr(inductor, name)
    raise AttributeError(f"module 'torch.{BACKEND}' has no attribute {name!r}")


def init() -> None:
    """Nothing to do: devices start on first use."""


# PyTorch calls it once, before it makes the first tensor on a device.
_lazy_init = init


def is_initialized() -> bool:
    """Whether the plugin has been started."""
    return _C.initialized()


def _is_in_bad_fork() -> bool:
    """Whether this process was forked from one that had started its devices."""
    return _C.forked()


# --- Current device ------------------------------------------------------------------------------


class device:
    """Context manager that makes a device current, for this thread.

    ``device`` is an index, a string or a ``torch.device``; None or a negative index change nothing.

    Args:
        device: an index, a string such as ``"lazyxla:1"`` or a ``torch.device``. None and negative
            indices change nothing.
    """

    def __init__(self, device: DeviceLike) -> None:
        unchanged = device is None or (isinstance(device, int) and device < 0)
        self.idx = -1 if unchanged else index_of(device)
        self._previous: list[int] = []  # one for each time that it is entered

    def __enter__(self) -> None:
        self._previous.append(exchange_device(self.idx))

    def __exit__(self, *exception: object) -> None:
        exchange_device(self._previous.pop())


class device_of(device):
    """Context manager that makes the device of a tensor or storage current, if it is ours.

    Args:
        obj: a tensor or a storage, on any device.
    """

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.device if obj.device.type == BACKEND else None)


def exchange_device(index: int) -> int:
    """Makes a device current and returns the previous index; a negative one changes nothing.

    Args:
        index: of the device; a negative one changes nothing.
    """
    return _C.exchange_device(index)


maybe_exchange_device = exchange_device
_exchange_device = exchange_device
_maybe_exchange_device = exchange_device


# --- Streams and events: one stream per device, see csrc/dispatch/guard.cpp ----------------------

Event = torch.Event
Stream = torch.Stream


def current_stream(device: DeviceLike = None) -> torch.Stream:
    """The device's one stream, by the name that the thread chose last; at first the default one's.

    All streams of a device are this one. ``torch.Stream(device)`` only gives it another name, since
    PyTorch makes a stream's device current only if the stream is not current already.

    Args:
        device: an index, ``"lazyxla:1"``, a ``torch.device``, or None for the current device.
    """
    return torch.accelerator.current_stream(torch.device(BACKEND, index_of(device)))


def default_stream(device: DeviceLike = None) -> torch.Stream:
    """The device's one stream, by the name that it has at first.

    Args:
        device: an index, ``"lazyxla:1"``, a ``torch.device``, or None for the current device.
    """
    current = current_stream(device)
    return torch.Stream(
        stream_id=0, device_index=current.device_index, device_type=current.device_type
    )


def set_stream(stream: torch.Stream) -> None:
    """Makes the stream, and so its device, current.

    Args:
        stream: of a device of ours.
    """
    torch.accelerator.set_stream(stream)


class StreamContext:
    """Context manager that makes a stream, and so its device, current; None changes nothing.

    Args:
        stream: of a device of ours; None changes nothing.
    """

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.stream is not None:
            self.stream.__exit__(*error)


stream = StreamContext


def get_stream_from_external(data_ptr: int, device: DeviceLike = None) -> torch.Stream:
    """Raises: PJRT's streams are its own.

    Args:
        data_ptr: ignored.
        device: ignored.
    """
    raise NotImplementedError("lazyxla has no streams to share with other libraries")


# --- Properties ----------------------------------------------------------------------------------


def get_device_capability(device: DeviceLike = None) -> dict[str, Any]:
    """The element types that tensors on a device may have: ``{"supported_dtypes": {...}}``.

    Args:
        device: an index, ``"lazyxla:1"``, a ``torch.device``, or None for the current device.
    """
    return torch.accelerator.get_device_capability(torch.device(BACKEND, index_of(device)))


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The element types that ``torch.autocast("lazyxla", dtype=...)`` takes."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """True: XLA computes in bfloat16 on every platform.

    Args:
        including_emulation: ignored; ``torch.cuda`` has it.
    """
    return True
