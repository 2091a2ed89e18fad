"""What the cases share: tensors that are spread over a mesh, and looking at how they are."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from models import MESH

import lazyxla
from tests.support import DEVICE

OWN_DEVICES = torch.lazyxla.device_count()
"""All eight, where there is one process."""

one_process = pytest.mark.skipif(
    "WORLD_SIZE" in os.environ, reason="is about a device which here another process may have"
)


def sharded(x: torch.Tensor, *spec: Any, mesh: lazyxla.Mesh = MESH) -> torch.Tensor:
    return lazyxla.shard(x.to(DEVICE), mesh, spec)


def spec_of(x: torch.Tensor) -> tuple[Any, ...]:
    found = lazyxla.sharding(x)
    assert found is not None
    return found.spec


def bytes_on_devices() -> list[int]:
    lazyxla.sync(wait=True)  # what only runs keep alive goes
    return [torch.lazyxla.memory_allocated(i) for i in range(OWN_DEVICES)]


def grid(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)
