"""What the on-disk store of compiled programs has to know (csrc/graph/program_store.h).

The store lies in the cache directory (``LAZYXLA_CACHE_DIR``) and is bounded by
``LAZYXLA_CACHE_SIZE``. A program is found again by the same versions only: of lazyxla's lowering,
of torch, whose decompositions are part of it, of JAX, and of the plugin.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
from pathlib import Path
from typing import NamedTuple

import torch

from lazyxla import lowering
from lazyxla.config import settings


class StoreSettings(NamedTuple):
    """As ProgramStore::Settings."""

    directory: str
    max_bytes: int
    version: str
    lowering_is_known: bool


def store_settings() -> StoreSettings:
    """Where programs are kept, how many bytes of them, and what their lowering depends on."""
    directory = os.path.join(settings.cache_directory(), "programs")
    if settings.cache_size:
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
        except OSError:
            directory = ""  # no place to keep them: they are compiled again
    # In strict mode a program that calls the host is an error, which a stored one would not raise.
    version = f"{_lowering_version()} strict={settings.strict_host_calls}"
    # What a user's rule does cannot be told from its name.
    known = not lowering.has_user_rules()
    return StoreSettings(directory, settings.cache_size << 20, version, known)


@functools.cache
def _lowering_version() -> str:
    """A checksum of the sources of the lowering, and the versions of what it is built on."""
    checksum = hashlib.sha256()
    package = Path(__file__).parent
    for path in sorted(package.glob("lowering/**/*.py")):
        checksum.update(str(path.relative_to(package)).encode() + b"\0")
        checksum.update(path.read_bytes() + b"\0")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib")]
    return " ".join([checksum.hexdigest(), f"torch {torch.__version__}", *versions])
