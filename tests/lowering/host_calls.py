"""What the tests of host calls share: matrices, and that a call is part of one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import lazyxla
from tests.support import check, counted, on_device


def matrix(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype)


def square(dtype: torch.dtype = torch.float64, *batch: int) -> torch.Tensor:
    """Well-conditioned matrices."""
    return matrix(*batch, 4, 4, dtype=dtype) + 4 * torch.eye(4, dtype=dtype)


def hermitian(dtype: torch.dtype = torch.float64, *batch: int) -> torch.Tensor:
    a = square(dtype, *batch)
    return a + a.mH


def in_one_program(function: Callable[..., Any], *args: Any, strides: bool = True) -> Any:
    """`check`, and that the function is one program with host calls in it and no fallbacks."""
    ours = on_device(args)
    lazyxla.sync()
    with counted() as n:
        kept = function(*ours)  # alive: dead code does not run
        lazyxla.sync(wait=True)
    assert n.executions == 1
    assert n.fallbacks == n.downloads == 0
    assert n.host_calls > 0
    del kept
    return check(function, *args, strides=strides)
