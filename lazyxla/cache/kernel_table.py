"""The table of this machine that says which work programs for the CPU leave to PyTorch's kernels.

lowering/cpu/kernel_limits.py describes it, kernel_measurements.py measures it. A file that cannot
be read (files.py) is as one that is not there.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping

import torch

from lazyxla.cache import files
from lazyxla.cache.environment import processor
from lazyxla.config import settings


def path() -> str:
    """Where the table of this machine is kept."""
    key = hashlib.sha256("\n".join(_machine()).encode()).hexdigest()[:16]
    return os.path.join(settings.cache_directory(), f"kernels-{key}.json")


def kept() -> dict[str, float] | None:
    """The table that was measured on this machine, or None."""
    content = files.read(path())
    if content is None:
        return None
    with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
        return {str(name): float(least) for name, least in json.loads(content)["limits"].items()}
    return None  # damaged


def keep(limits: Mapping[str, float]) -> None:
    """Keeps the table of this machine.

    Raises:
        OSError: it cannot be written.
    """
    files.prepare_directory(settings.cache_directory())
    unfinished = f"{path()}.{os.getpid()}"
    with open(unfinished, "w", opener=files.opener) as file:
        json.dump({"machine": list(_machine()), "limits": dict(limits)}, file, indent=1)
    os.replace(unfinished, path())


@functools.cache
def _machine() -> tuple[str, ...]:
    """What the times depend on."""
    versions = [f"torch {torch.__version__}"]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a plugin given by its path
        versions.append(f"xla-cpu-pjrt {importlib.metadata.version('xla-cpu-pjrt')}")
    return (processor(), f"{torch.get_num_threads()} threads", *versions)
