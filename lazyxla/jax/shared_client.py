"""JAX on the device's own client, so that both can use one TPU, and arrays pass without a copy."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lazyxla import _C, runtime
from lazyxla.foreign_functions import provide_lapack
from lazyxla.lowering.jax_call import numpy_dtype
from lazyxla.spmd import sharding

NAME = "lazyxla"
"""JAX's name for the platform."""


@functools.cache
def share_with_jax() -> None:
    """Gives JAX this process's devices, which it then uses by the same client.

    A second client on a TPU fails; so without this only one of JAX and lazyxla can use it in a
    process. Afterwards ``jax.devices()`` are lazyxla's, and :func:`lazyxla.from_jax` and
    :func:`lazyxla.to_jax` copy nothing, on any platform: both hold the same buffer, which no
    program of either consumes as long as both do. Where ``jax_platforms`` is not set, it becomes
    "lazyxla,cpu". Starts the device.

    Raises:
        RuntimeError: JAX uses its own devices already; or ``jax_platforms`` leaves "lazyxla" out.
    """
    import jax
    from jax._src import xla_bridge  # plugins register themselves by it

    if xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "JAX uses its own devices already: call lazyxla.share_with_jax() before anything that "
            "makes an array, or asks for jax.devices()"
        )
    platforms: str | None = jax.config.jax_platforms  # type: ignore[attr-defined]
    if platforms and NAME not in platforms.split(","):
        raise RuntimeError(
            f"jax_platforms is {platforms!r}: leave it unset (and JAX_PLATFORMS, too), or add "
            f'"{NAME}" to it'
        )
    api = _C.shared_api()
    if runtime.platform() == "cpu":
        provide_lapack()
    xla_bridge.register_plugin(NAME, c_api=api)
    if not platforms:
        jax.config.update("jax_platforms", f"{NAME},cpu")


def is_shared() -> bool:
    """Whether JAX has the device's client."""
    return share_with_jax.cache_info().currsize > 0


def can_lend(tensor: torch.Tensor) -> bool:
    """Whether JAX can have the tensor's own memory."""
    return (
        is_shared()
        and tensor.device.type == runtime.BACKEND
        and tensor.numel() > 0
        and sharding(tensor) is None
    )


def lend(tensor: torch.Tensor) -> Any:
    """A JAX array on the memory of a tensor of the device."""
    import jax

    taken: list[Any] = []
    # The array that JAX seems to copy; it gets the tensor's buffer instead.
    stand_in = np.broadcast_to(np.zeros((), numpy_dtype(tensor.dtype)), tuple(tensor.shape))
    device = jax.devices(NAME)[tensor.device.index or 0]
    _C.lend(tensor, lambda: taken.append(jax.device_put(stand_in, device)))
    return taken[0]


def borrow(array: Any) -> torch.Tensor | None:
    """A tensor on the memory of a JAX array; None if it is not on one device of the shared client,
    row-major."""
    if not is_shared() or array.size == 0 or len(array.devices()) != 1:
        return None
    (device,) = array.devices()
    jax: Any = sys.modules["jax"]
    if device.client is not jax.devices(NAME)[0].client or not _is_in_rows(array):
        return None
    ask: Callable[[], int] = array.unsafe_buffer_pointer
    return _C.borrow(getattr(torch, str(array.dtype)), list(array.shape), lambda: (ask(), None)[1])


def _is_in_rows(array: Any) -> bool:
    layout = array.format.layout
    return layout is None or tuple(layout.major_to_minor) == tuple(range(array.ndim))
