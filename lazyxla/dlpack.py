"""Memory that the device and the host share, where the device is the host: nothing is copied."""

from __future__ import annotations

from typing import Any

import torch

from lazyxla import _C
from lazyxla.runtime import DeviceLike, index_of


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a CPU tensor on the memory of a tensor of the device, for reading only.

    NumPy, JAX and others take it without a copy: ``lazyxla.host_view(x).numpy()``,
    ``jax.dlpack.from_dlpack(lazyxla.host_view(x))``. Recorded operators run first. The view keeps
    the values of this moment, even if ``tensor`` is written to later, and keeps its memory alive.
    Do not write to it: that would change values that programs have computed.

    Args:
        tensor: of the device, of any shape, strides and dtype. One that is not row-major in its
            memory, or is a view of another dtype, is copied within the device first.

    Returns:
        A tensor of the same shape and dtype, which requires no gradient.

    Raises:
        ValueError: the tensor is not on a lazyxla device.
        NotImplementedError: the device's memory is not the host's: use ``tensor.cpu()``.
    """
    return _C.host_view(tensor)


def from_dlpack(source: Any, device: DeviceLike = None) -> torch.Tensor:
    """Makes a tensor of the device out of an array of the host, on the CPU on the same memory.

    Do not write to the array as long as the tensor, or anything that is still to be computed from
    it, is alive. Writing to the tensor does not change the array. Memory that the device cannot use
    in place is copied: always on accelerators; on the CPU if there are gaps between the elements
    or strides are negative, or if it does not begin at a multiple of 64 bytes (PyTorch's and JAX's
    memory does).
    ``lazyxla.counters()["uploads"]`` counts the copies.

    Args:
        source: a NumPy array, a JAX array on the CPU, a CPU tensor, or another object that has
            ``__dlpack__`` and is in the host's memory; of any shape, strides and dtype that the
            device has.
        device: the device; None means the current one.

    Returns:
        A tensor of the same shape, strides (but negative ones) and dtype.

    Raises:
        ValueError: the array is not in the host's memory.
        TypeError: it is no array.
    """
    index = index_of(device)
    if not isinstance(source, torch.Tensor):
        if not hasattr(source, "__dlpack__"):
            raise TypeError(f"expected an array with __dlpack__, got {type(source).__name__}")
        # Of NumPy's arrays, for PyTorch aborts the process.
        if any(stride < 0 for stride in getattr(source, "strides", None) or ()):
            source = source.copy()
        source = torch.from_dlpack(source)
    return _C.share_host(source, index)
