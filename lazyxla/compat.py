"""Where versions of PyTorch and JAX differ. No other module checks a version.

docs/versions.md says what was run against what, and what to do for a new release. Differences in
torch's C++ interface are in csrc/common/compat.h.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

CLAMP_SATURATES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
"""Whether a bound of ``clamp`` beyond the range of an integer dtype bounds nothing, as from torch
2.15 on. Before, PyTorch's CPU kernels wrap it around or refuse it."""

REMOVED_OPERATORS = frozenset({"aten::cholesky"})
"""Operators with a rule that not every torch has: ``aten::cholesky`` is gone in 2.15."""


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """A function's signature. From Python 3.14 on annotations are computed when they are asked for,
    and may name what is imported for type checkers only; its name stands for it then."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.FORWARDREF)
    return inspect.signature(function)


def minor_of(version: str) -> str:
    """``"2.15"`` of ``"2.15.0+cu132"``."""
    return ".".join(version.split(".")[:2])


def check_torch_version(built: str, running: str) -> None:
    """Checks that the extension, built for one version of torch, fits the running one.

    Args:
        built: version of the torch that the extension was compiled against, e.g. "2.13.0+cpu".
        running: ``torch.__version__``.

    Raises:
        ImportError: major or minor version differ. torch's C++ interface is stable within a minor
            version only.
    """
    if minor_of(built) != minor_of(running):
        raise ImportError(
            f"lazyxla was built for torch {built}, but torch {running} is installed: install "
            f"lazyxla's wheel for it (its version ends in +torch{minor_of(running)}), or torch "
            f"{minor_of(built)}, or build lazyxla again (pip install --no-build-isolation "
            "--force-reinstall --no-deps lazyxla; in a source checkout: pip install "
            "--no-build-isolation --no-deps -e .)"
        )


def check_extension(running: str) -> None:
    """Checks, before it is loaded, that the extension is there for this Python and this torch.

    Args:
        running: ``torch.__version__``.

    Raises:
        ImportError: it was not built, or for another torch or Python.
    """
    try:
        from lazyxla._build_info import TORCH_VERSION
    except ImportError as error:
        raise ImportError(
            "lazyxla's extension is not built: run `make build` in the source checkout, or "
            "pip install --no-build-isolation -e ."
        ) from error
    check_torch_version(TORCH_VERSION, running)
    if importlib.util.find_spec("lazyxla._C") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise ImportError(
            f"lazyxla's extension is not built for Python {version}: install lazyxla's wheel for "
            f"it (cp{version.replace('.', '')}), or build lazyxla with this Python (pip install "
            "--no-build-isolation --no-deps -e .)"
        )
