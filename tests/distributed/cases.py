"""What the processes of tests/test_distributed.py compute: by name, a function of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Case = Callable[[str], Any]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def ranked(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Other numbers in each process."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) % 7 + 1 + dist.get_rank()).to(dtype).reshape(shape)).to(device)
