"""What the tests of an older PyTorch, or those for CUDA, find missing."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.testing._internal import common_cuda, common_utils

from tests.upstream.distributed.names import DEVICES, HAS_DEVICE


def prepare(device: str, own_device: bool) -> None:
    """Adds it, once names are put in. `own_device`: each process has one."""
    for module in (common_cuda, common_utils):
        setattr(module, HAS_DEVICE, True)
    fsdp = importlib.import_module("torch.testing._internal.common_fsdp")
    fsdp.test_compiled_fsdp = fsdp.compiled_fsdp_test  # type: ignore[attr-defined]
    distributed = importlib.import_module("torch.testing._internal.common_distributed")
    distributed.requires_nccl_version = lambda *_: lambda test: test  # type: ignore[attr-defined]
    continuous = importlib.import_module("tests.upstream.distributed.continuous")
    distributed.MultiProcContinousTest = continuous.MultiProcContinousTest  # type: ignore[attr-defined]
    common_cuda.TEST_MULTIGPU = True
    # What keeps a GPU busy, where tests look for races between its streams.
    common_utils.get_cycles_per_ms = lambda: 1.0
    getattr(torch, device)._sleep = lambda _: None
    if device == "cpu":
        torch.cpu.device_count = lambda: DEVICES
    if own_device:
        torch.lazyxla.set_device = torch.accelerator.set_device_index = lambda _: None
    else:
        _start_before_threads(distributed.MultiThreadedTestCase, device)


def _start_before_threads(cls: Any, device: str) -> None:
    """Starts a device before the threads of a test, whose meshes else take another one for each.

    In a process of several tests on CUDA an earlier one has started it.
    """
    spawn = cls._spawn_threads

    def start_and_spawn(self: Any) -> None:
        torch.ones(1, device=device).item()
        spawn(self)

    cls._spawn_threads = start_and_spawn
