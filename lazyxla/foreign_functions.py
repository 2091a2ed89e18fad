"""Functions of other libraries that programs call by name: XLA's foreign function interface (FFI).

A plugin drops a handler that was made for a newer version of the interface than its own. So what is
registered here is called through a function of ours (csrc/pjrt/ffi.h).
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from typing import Any

from lazyxla import _C, runtime

_PLATFORMS = ("cpu", "cuda")


def register_ffi_target(
    name: str, library: str | os.PathLike[str], symbol: str, platform: str = "cpu"
) -> None:
    """Makes an FFI handler in a shared library known to programs on a platform.

    A program calls it by its name: a JAX function by ``jax.ffi.ffi_call(name, ...)``, in
    :func:`lazyxla.call_jax`; a rule of one's own by a ``stablehlo.custom_call`` with
    ``api_version = 4``. It is to be registered in every process, before the first program that
    calls it. A handler is made with ``XLA_FFI_DEFINE_HANDLER_SYMBOL`` of ``xla/ffi/api/ffi.h``
    (``jax.ffi.include_dir()``).

    Args:
        name: how programs call it.
        library: path of the shared library, which is loaded and never unloaded.
        symbol: the handler's name in it.
        platform: "cpu" or "cuda". Where the process has another, nothing happens.

    Raises:
        OSError: the library cannot be loaded.
        ValueError: it has no such symbol; there is no such platform; the name is that of another
            handler.
        NotImplementedError: the plugin takes no handlers.
    """
    if platform not in _PLATFORMS:
        raise ValueError(f'an FFI handler is for "cpu" or "cuda", not for {platform!r}')
    loaded = ctypes.CDLL(os.fspath(library))
    try:
        function = getattr(loaded, symbol)
    except AttributeError:
        raise ValueError(f"{os.fspath(library)} has no symbol {symbol}") from None
    if runtime.platform() == platform:
        _register(name, ctypes.cast(function, ctypes.c_void_p).value)


@functools.cache
def provide_lapack() -> None:
    """Makes known what JAX calls for linear algebra on the CPU: jaxlib's handlers for LAPACK."""
    lapack = importlib.import_module("jaxlib.lapack")
    lapack._lapack.initialize()
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    for name, capsule, _ in lapack.registrations()["cpu"]:
        _register(name, address(capsule, b"xla._CUSTOM_CALL_TARGET"))


def _register(name: str, address: Any) -> None:
    try:
        known = _C.register_ffi_target(name, address)
    except RuntimeError as error:
        raise ValueError(f"the FFI handler {name}: {error}") from None
    if not known:
        raise NotImplementedError(f"the plugin for {runtime.platform()} takes no FFI handlers")
