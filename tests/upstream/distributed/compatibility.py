"""What the tests of an older PyTorch, or those for CUDA, find missing."""

from __future__ import annotations

import importlib

import torch
from torch.testing._internal import common_cuda, common_utils

from tests.upstream.distributed.names import HAS_DEVICE

_DEVICES = 4
"""What a process pretends to have, for the tests compare that with the number of processes."""


def prepare(device: str, own_device: bool) -> None:
    """Adds it, once names are put in. `own_device`: each process has one."""
    for module in (common_cuda, common_utils):
        setattr(module, HAS_DEVICE, True)
    fsdp = importlib.import_module("torch.testing._internal.common_fsdp")
    fsdp.test_compiled_fsdp = fsdp.compiled_fsdp_test  # type: ignore[attr-defined]
    distributed = importlib.import_module("torch.testing._internal.common_distributed")
    distributed.requires_nccl_version = lambda *_: lambda test: test  # type: ignore[attr-defined]
    if device == "cpu":
        torch.cpu.device_count = lambda: _DEVICES
    if own_device:
        for module in (torch.lazyxla, torch.accelerator):
            module.device_count = lambda: _DEVICES
        torch.lazyxla.set_device = torch.accelerator.set_device_index = lambda _: None
