"""Where the checks are entered, and what they are written with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

Arguments = Mapping[str, Any]
Check = Callable[[Arguments], None]
ResultCheck = Callable[[Arguments, Sequence[int]], None]
"""Takes the sizes of the first result, too."""

Warnings = Callable[[Arguments], Sequence[str]]
"""Returns the texts."""

T = TypeVar("T", bound=Callable[..., object])

BEFORE: dict[str, Check] = {}
"""By operator: before PyTorch is asked about the result's shape. Once for each kind of call."""
AFTER: dict[str, ResultCheck] = {}
"""Once the shape is known. Once for each kind of call."""
OF_NUMBERS: dict[str, Check] = {}
"""Of numbers, instead of calling the CPU's kernel. Once for each."""
VALUES: dict[str, Check] = {}
"""Of tensors' values, if the setting `check_indices` is on. At each call."""
WARNINGS: dict[str, Warnings] = {}
"""What the CPU's kernel warns of, given sizes and numbers. At each call, until it is nothing."""


def checks(table: dict[str, T], *names: str) -> Callable[[T], T]:
    """Enters a function in a table, for these of PyTorch's operators."""

    def enter(check: T) -> T:
        for name in names:
            assert f"aten::{name}" not in table, f"{name} has a check already"
            table[f"aten::{name}"] = check
        return check

    return enter


def named(part: str) -> list[str]:
    """PyTorch's operators, but for gradients, that have this in their names."""
    names = (name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names())
    return [name for name in names if part in name and "backward" not in name]


def require(condition: bool, message: str) -> None:
    """Raises a RuntimeError unless the condition holds."""
    if not condition:
        raise RuntimeError(message)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """The name in PyTorch's messages: Float, Long."""
    name = torch.empty(0, dtype=dtype, device="cpu").type()
    return name.removeprefix("torch.").removesuffix("Tensor")
