"""Models and ways to spread them, which the cases of training share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import lazyxla

MESH = lazyxla.Mesh((4, 2), ("data", "model"))
VOCABULARY, WIDTH, LENGTH, BATCH = 64, 32, 16, 8


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self(x), y)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        # A bias of the keys has no gradient but rounding errors, which Adam makes steps of.
        self.q, self.k, self.v = (
            nn.Linear(WIDTH, WIDTH, bias=bias) for bias in (True, False, True)
        )
        self.o, self.mlp = nn.Linear(WIDTH, WIDTH), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        heads = (m(y).unflatten(-1, (4, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(x).flatten(0, 1), y.flatten())


def batches(
    model: type[nn.Module], count: int, dtype: torch.dtype = torch.float32
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets; of `dtype` where they are no tokens."""
    generator = torch.Generator().manual_seed(1)
    if model is Mlp:
        targets = torch.ones(BATCH, WIDTH, dtype=dtype)
        inputs = (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(count))
        return [(x.to(dtype), targets) for x in inputs]
    shape = (BATCH, LENGTH)
    return [
        (
            torch.randint(VOCABULARY, shape, generator=generator),
            torch.randint(VOCABULARY, shape, generator=generator),
        )
        for _ in range(count)
    ]


Spec = tuple[Any, ...]


def tensor_parallel(name: str, tensor: torch.Tensor) -> Spec:
    """As Megatron does it: columns of the first product, rows of the second."""
    layer, kind = name.rsplit(".", 1) if "." in name else ("", name)
    layer = layer.rsplit(".", 1)[-1]
    if layer in ("q", "k", "v", "up"):
        return ("model",)
    if layer in ("o", "down") and kind == "weight":
        return (None, "model")
    return ()


def over(axis: str, spec: Spec, tensor: torch.Tensor) -> Spec:
    """Splits the first dimension that is whole and divides along an axis, too."""
    entries = [*spec, *[None] * (tensor.dim() - len(spec))]
    for i, size in enumerate(tensor.shape):
        if entries[i] is None and size % MESH.axis_size(axis) == 0:
            entries[i] = axis
            break
    return tuple(entries)


def fsdp(name: str, tensor: torch.Tensor) -> Spec:
    return over("data", (), tensor)


def fsdp_and_tensor_parallel(name: str, tensor: torch.Tensor) -> Spec:
    return over("data", tensor_parallel(name, tensor), tensor)


PLANS: dict[str, Callable[[str, torch.Tensor], Spec]] = {
    "data": lambda name, tensor: (),
    "fsdp": fsdp,
    "tensor": tensor_parallel,
    "fsdp x tensor": fsdp_and_tensor_parallel,
}
