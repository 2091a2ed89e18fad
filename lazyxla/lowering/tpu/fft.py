"""Fourier transforms on a TPU, whose compiler has none for float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.errors import LoweringError
from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.fft import LOWERINGS
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


def _of_float32(lower: Callable[..., Any]) -> Callable[..., Any]:
    def refuse_float64(b: Builder, x: Value, *options: Any) -> Any:
        if x.dtype in (torch.float64, torch.complex128):
            raise LoweringError("XLA's TPU compiler has no Fourier transform of float64")
        return lower(b, x, *options)

    return refuse_float64


for _name, _lower in LOWERINGS.items():
    rule(_name, platforms=("tpu",))(_of_float32(_lower))
