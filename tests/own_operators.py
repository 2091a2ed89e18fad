"""Users' own operators whose kernels are the CPU's, and a rule that tests may register."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ON_CPU: dict[str, Any] = {"mutates_args": (), "device_types": "cpu"}
"""What such operators are defined with."""


@torch.library.custom_op("lazyxla_own::scale", **ON_CPU)
def scale(x: Tensor, by: float, offset: int = 0) -> Tensor:
    return torch.from_numpy(x.numpy() * by + offset)


@scale.register_fake
def _(x: Tensor, by: float, offset: int = 0) -> Tensor:
    if x.dim() != 1:
        raise ValueError("scale takes vectors")
    return torch.empty_like(x)


scale.register_autograd(
    lambda ctx, grad: (scale(grad, ctx.by), None, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]),
)


def lower_scale(b: Any, x: Any, by: Any, offset: Any) -> Any:
    return b.hlo.add(b.scale(x, by), b.full(b.shape(x), offset, b.dtype(x)))


def surrounded(x: Tensor) -> Tensor:
    return scale(x + 1, 2.5, offset=1) - 1


X = torch.arange(3.0)


@torch.library.custom_op("lazyxla_own::bump", mutates_args={"x"}, device_types="cpu")
def bump(x: Tensor, by: Tensor) -> Tensor:
    x += by
    return x.sum()


@bump.register_fake
def _(x: Tensor, by: Tensor) -> Tensor:
    return x.new_empty(())
