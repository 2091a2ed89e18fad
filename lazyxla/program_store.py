"""What the on-disk store of compiled programs has to know (csrc/program/program_store.h).

The store lies in the cache directory (``LAZYXLA_CACHE_DIR``) and is bounded by
``LAZYXLA_CACHE_SIZE``. A program is found again by the same versions only: of lazyxla's lowering,
of torch, whose decompositions are part of it, of JAX, and of the plugin.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import re
from pathlib import Path
from typing import NamedTuple

import torch

from lazyxla import _C, lowering
from lazyxla.config import settings


class StoreSettings(NamedTuple):
    """As ProgramStore::Settings."""

    directory: str
    max_bytes: int
    version: list[tuple[str, str]]
    lowering_is_known: bool


def store_settings() -> StoreSettings:
    """Where programs are kept, how many bytes of them, and what their lowering depends on."""
    return _with_versions(_programs(settings.cache_directory()))


def settings_for(cache_directory: str | os.PathLike[str] | None) -> StoreSettings:
    """The same for a cache directory that is given; None is that of the settings.

    Raises:
        ValueError: the settings say that no programs are kept.
        OSError: there is no such directory, and none can be made; or others can write to it.
    """
    if not settings.cache_size:
        raise ValueError(
            "compiled programs are to be kept, but LAZYXLA_CACHE_SIZE (setting cache_size) is 0"
        )
    cache = os.path.abspath(os.fspath(cache_directory or settings.cache_directory()))
    for directory in (cache, _programs(cache)):
        if refused := _C.prepare_directory(directory):
            raise OSError(*refused, directory)
    return _with_versions(_programs(cache))


def _programs(cache_directory: str) -> str:
    return os.path.join(cache_directory, "programs")


def _with_versions(directory: str) -> StoreSettings:
    # In strict mode a program that calls the host is an error, which a stored one would not raise.
    version = [*_lowering_version(), ("strict host calls", str(settings.strict_host_calls))]
    # What a user's rule does cannot be told from its name.
    known = not lowering.has_user_rules()
    return StoreSettings(directory, settings.cache_size << 20, version, known)


@functools.cache
def _lowering_version() -> list[tuple[str, str]]:
    """A checksum of the sources of the lowering, and the versions of what it is built on."""
    checksum = hashlib.sha256()
    package = Path(__file__).parent
    for path in sorted(package.glob("lowering/**/*.py")):
        checksum.update(str(path.relative_to(package)).encode() + b"\0")
        checksum.update(path.read_bytes() + b"\0")
    return [
        ("lowering", checksum.hexdigest()),
        ("torch", _public_version(torch.__version__)),
        *((name, importlib.metadata.version(name)) for name in ("jax", "jaxlib")),
    ]


def _public_version(version: str) -> str:
    """Without what tells the wheels of a version apart, which differ in their kernels only."""
    return re.sub(r"\+(cpu|cu\d+|rocm[\d.]+|xpu)$", "", version)
