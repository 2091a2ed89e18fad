"""Memory of the devices, in the manner of ``torch.cuda``.

Counted are the arrays that lazyxla holds, exactly and to the byte; temporary memory of running
programs is not among them. Numbers of the plugin's own allocator are added, if it reports any; the
CPU's does not. ``torch.accelerator`` has the same numbers.
"""

from __future__ import annotations

import gc
import math

import torch

from lazyxla import _C, reporting, spmd
from lazyxla.runtime import BACKEND, DeviceLike, get_device_name, index_of

_LARGEST = 5  # tensors in a message


def memory_stats(device: DeviceLike = None) -> dict[str, int]:
    """All that is known of a device's memory, in the names of ``torch.cuda.memory_stats``.

    ``allocation.all.*`` counts arrays, ``allocated_bytes.all.*`` their bytes: ``current``, ``peak``
    (the most since the start or :func:`reset_peak_memory_stats`), ``allocated`` and ``freed``
    (totals since the start or :func:`reset_accumulated_memory_stats`).
    ``reserved_bytes.all.current`` and ``.peak`` are the bytes that the plugin's allocator holds, in
    use or not; if it does not report them, they equal ``allocated_bytes``. Other numbers of the
    plugin begin with ``plugin.``. The dict is empty before the first use of a device.

    Args:
        device: an index, ``"lazyxla:1"``, a ``torch.device``, or None for the current device.
    """
    return _C.memory_stats(index_of(device)) if _C.initialized() else {}


def memory_allocated(device: DeviceLike = None) -> int:
    """Bytes that the arrays on a device occupy.

    Args:
        device: an index, ``"lazyxla:1"``, a ``torch.device``, or None for the current device.
    """
    return memory_stats(device).get("allocated_bytes.all.current", 0)


def max_memory_allocated(device: DeviceLike = None) -> int:
    """The most that :func:`memory_allocated` was since the start or the last reset.

    Args:
        device: an index, ``"lazyxla:1"``, a ``torch.device``, or None for the current device.
    """
    return memory_stats(device).get("allocated_bytes.all.peak", 0)


def memory_reserved(device: DeviceLike = None) -> int:
    """Bytes that the plugin's allocator holds, in use or not.

    Equal to :func:`memory_allocated` if the plugin does not report it, as on the CPU.

    Args:
        device: an index, ``"lazyxla:1"``, a ``torch.device``, or None for the current device.
    """
    return memory_stats(device).get("reserved_bytes.all.current", 0)


def max_memory_reserved(device: DeviceLike = None) -> int:
    """The most that :func:`memory_reserved` was since the start; see :func:`memory_stats`.

    Args:
        device: an index, ``"lazyxla:1"``, a ``torch.device``, or None for the current device.
    """
    return memory_stats(device).get("reserved_bytes.all.peak", 0)


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Resets :func:`max_memory_allocated` to the present :func:`memory_allocated`.

    Args:
        device: an index, ``"lazyxla:1"``, a ``torch.device``, or None for the current device.
    """
    if _C.initialized():
        _C.reset_peak_memory_stats(index_of(device))


def reset_accumulated_memory_stats(device: DeviceLike = None) -> None:
    """Sets ``allocated`` and ``freed`` of :func:`memory_stats` to zero.

    Args:
        device: an index, ``"lazyxla:1"``, a ``torch.device``, or None for the current device.
    """
    if _C.initialized():
        _C.reset_accumulated_memory_stats(index_of(device))


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Free and total bytes of a device's memory. Starts the plugin.

    The plugin reports them. The CPU's plugin does not: there they are the machine's available and
    installed memory, which all CPU devices share.

    Args:
        device: an index, ``"lazyxla:1"``, a ``torch.device``, or None for the current device.

    Raises:
        NotImplementedError: the plugin does not report them.
    """
    return _C.memory_info(index_of(device))


def empty_cache() -> None:
    """Gives the large blocks of freed memory that the CPU plugin keeps back to the system.

    On other platforms it does nothing: PJRT has no function by which a plugin gives back memory.
    """
    _C.release_kept_memory()


def memory_summary(device: DeviceLike = None) -> str:
    """A table of :func:`memory_stats` and :func:`mem_get_info` to print. Starts the plugin.

    Args:
        device: an index, ``"lazyxla:1"``, a ``torch.device``, or None for the current device.
    """
    index = index_of(device)
    try:
        free, total = mem_get_info(index)
        room = f"{_bytes(free)} of {_bytes(total)} free"
    except NotImplementedError:
        room = "size not told"
    stats = memory_stats(index)
    columns = ("current", "peak", "allocated", "freed")
    rows: list[tuple[str, ...]] = [("", *columns)]
    for title, name, show in (
        ("arrays", "allocation", str),
        ("their memory", "allocated_bytes", _bytes),
        ("reserved", "reserved_bytes", _bytes),
    ):
        values = [stats.get(f"{name}.all.{column}") for column in columns]
        rows.append((title, *("" if value is None else show(value) for value in values)))
    for name, value in stats.items():
        if name.startswith("plugin."):
            count = name == "plugin.num_allocs"
            rows.append((name, str(value) if count else _bytes(value), "", "", ""))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [f"lazyxla:{index}, {get_device_name(index)}: {room}"]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def largest_tensors(device: int) -> str:
    """Lines for a message: which tensors of the user's take most of a device's memory, and how they
    are spread over the devices; empty if there are none.

    Those are counted that Python has, also ones that are recorded only. Walks all objects there
    are: for messages about failures only.
    """
    everything = gc.get_objects()
    names = reporting.names_by_address(everything)
    found: dict[int, tuple[int, str]] = {}  # by address
    for thing in everything:
        # Tensors of other classes, such as DTensor, may have no memory of their own.
        if type(thing) not in (torch.Tensor, torch.nn.Parameter) or thing.device.type != BACKEND:
            continue
        address = thing.data_ptr()
        if address in found:
            continue
        nbytes, how = _bytes_on(device, thing)
        dtype = str(thing.dtype).removeprefix("torch.")
        text = f"{names.get(address, 'a tensor')}, {dtype}{list(thing.shape)}{how}"
        if nbytes > 0:
            found[address] = nbytes, text
    largest = sorted(found.values(), reverse=True)[:_LARGEST]
    return "\n".join(f"  {_bytes(nbytes)}: {text}" for nbytes, text in largest)


def _bytes_on(device: int, tensor: torch.Tensor) -> tuple[int, str]:
    """How much of a tensor's memory is on a device, and how the tensor is spread."""
    raw = _C.known_sharding(tensor)
    if raw is None:
        return tensor.untyped_storage().nbytes() if tensor.device.index == device else 0, ""
    if device not in raw.mesh.devices:
        return 0, ""
    nbytes = math.prod(raw.shard_shape(list(tensor.shape))) * tensor.itemsize
    return nbytes, f", sharded as {spmd.spec_of(raw)} over {raw.mesh.text}"


def _bytes(count: int) -> str:
    """With the unit that leaves few digits, as ``torch.cuda.memory_summary`` has it."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    size = float(count)
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{count} B" if units[0] == "B" else f"{size:.1f} {units[0]}"
