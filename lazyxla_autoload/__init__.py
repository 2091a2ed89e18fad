"""Registers lazyxla with PyTorch when PyTorch is imported, unless there is another accelerator.

A package of its own, because importing anything from lazyxla registers it. PyTorch has one
accelerator in a process, and takes a registered one for it before CUDA: from then on it computes no
gradients on CUDA devices, and ``torch.accelerator`` is lazyxla's. Whoever has another accelerator
and wants lazyxla imports it.
"""

from __future__ import annotations

import os

import torch

_CUDA_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


def autoload() -> None:
    """Entry point ``torch.backends``: ``import torch`` calls it at its end."""
    if not _has_accelerator():
        import lazyxla  # noqa: F401


def _has_accelerator() -> bool:
    """Whether torch was built with support for an accelerator and finds one."""
    before = os.environ.get(_CUDA_CHECK)
    os.environ[_CUDA_CHECK] = "1"  # by the driver's library: a CUDA context would not survive fork
    try:
        return torch.accelerator.current_accelerator(check_available=True) is not None
    finally:
        if before is None:
            del os.environ[_CUDA_CHECK]
        else:
            os.environ[_CUDA_CHECK] = before
