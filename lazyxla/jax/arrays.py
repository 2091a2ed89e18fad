"""JAX's arrays as tensors of the device, and tensors as JAX's arrays."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lazyxla import _C, dlpack, runtime
from lazyxla.jax import shared_client
from lazyxla.jax.flat_functions import taken_as
from lazyxla.lowering.jax_call import numpy_dtype
from lazyxla.runtime import DeviceLike


def from_jax(tree: Any, device: DeviceLike = None) -> Any:
    """A pytree with tensors of the device in place of its JAX arrays.

    If JAX's device and lazyxla's are both the CPU, nothing is copied: the tensor uses the array's
    memory and keeps it alive, and writing to the tensor does not change the array. An array of
    another device is copied through the host. Keys of ``jax.random`` arrive as their data.

    Args:
        tree: a pytree of JAX or NumPy arrays, of any shape, and of other things, which stay as they
            are.
        device: the device; None means the current one, or the array's own where JAX shares the
            client (:func:`lazyxla.share_with_jax`).

    Raises:
        TypeError: PyTorch has no such dtype.
    """
    return pytree.tree_map(lambda leaf: _tensor(leaf, device) if is_array(leaf) else leaf, tree)


def to_jax(tree: Any) -> Any:
    """A pytree with JAX arrays in place of its tensors.

    Recorded operators run first. If JAX's default device and the tensor's are both the CPU, an
    array uses its tensor's memory; it keeps the values of this moment, even if the tensor is
    written to later. Otherwise it is a copy on JAX's default device.

    Args:
        tree: a pytree of tensors, of any device and shape, and of other things, which stay as they
            are. If ``jax_enable_x64`` is off, 64-bit integers arrive as 32-bit ones.

    Raises:
        TypeError: JAX has no such dtype, or, as float64, only if ``jax_enable_x64`` is on.
    """
    return pytree.tree_map(lambda leaf: _array(leaf) if _is_tensor(leaf) else leaf, tree)


def host_tensor(array: Any) -> torch.Tensor:
    """A CPU tensor on the memory of a JAX or NumPy array, or of a copy of it."""
    import numpy as np

    host = np.asarray(array)
    dtype = torch_dtype(host.dtype)
    if host.size == 0:
        return torch.empty(host.shape, dtype=dtype)
    # The tensor is never written to; PyTorch would warn of an array that is marked as read-only.
    rows = np.ascontiguousarray(host)
    memory: Any = (ctypes.c_uint8 * rows.nbytes).from_address(rows.ctypes.data)
    memory._keeps = rows
    return torch.frombuffer(memory, dtype=dtype).reshape(host.shape)


def torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype of a NumPy dtype. Raises TypeError if there is none."""
    found = getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"PyTorch has no dtype for an array of {dtype}")
    return found


def is_array(leaf: Any) -> bool:
    """Whether it is an array of JAX's, traced or not, or of NumPy's."""
    import jax
    import numpy as np

    return isinstance(leaf, (jax.Array, np.ndarray))


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _tensor(array: Any, device: DeviceLike) -> torch.Tensor:
    import jax

    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    found = shared_client.borrow(array) if isinstance(array, jax.Array) else None
    if found is not None:
        return found if device is None else found.to(device)
    return _C.share_host(host_tensor(array), runtime.index_of(device))


def _array(tensor: torch.Tensor) -> Any:
    import jax

    wide: bool = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    dtype = taken_as(tensor.dtype, wide)
    tensor = tensor.detach()
    if shared_client.can_lend(tensor):
        return shared_client.lend(tensor.to(dtype))
    if tensor.device.type == runtime.BACKEND:
        tensor = _on_host(tensor)
    else:
        tensor = tensor.cpu().clone()  # may be written to
    host = tensor.to(dtype).resolve_conj().resolve_neg().contiguous()
    if host.numel() == 0:
        return jax.numpy.zeros(tuple(host.shape), numpy_dtype(dtype))
    # Neither library knows the other's small floats.
    raw = host.reshape(-1).view(torch.uint8).numpy()
    return jax.device_put(raw.view(numpy_dtype(dtype)).reshape(tuple(host.shape)))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return dlpack.host_view(tensor)
    except NotImplementedError:
        return tensor.cpu()
