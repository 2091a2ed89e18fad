"""The decoder of decoder_model.py with a mixture of experts (Mixtral): in each layer several
feed-forward parts, of which each token takes the few that a router chooses.

All shapes are fixed: an expert has as many places as its capacity says, and a token that finds none
left passes it by. Tokens go to places and back by products with one-hot matrices (D. Lepikhin et
al., "GShard", 2020), which a partitioner splits like any other product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from decoder_model import Decoder, DecoderConfig
from torch import Tensor, nn
from torch.nn import functional

import lazyxla


@dataclass(frozen=True)
class MixtralConfig(DecoderConfig):
    """Sizes of a decoder with `experts`, of which each token takes `chosen`."""

    experts: int = 8
    chosen: int = 2
    capacity_factor: float = 1.25
    """An expert's places, as a multiple of its even share of a group's choices."""
    group: int = 1024
    """So many tokens share an expert's places."""

    @property
    def capacity(self) -> int:
        """An expert's places for one group of tokens."""
        return math.ceil(self.capacity_factor * self.group * self.chosen / self.experts)


MIXTRAL_8X7B = MixtralConfig(
    hidden=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    intermediate=14336,
    vocab=32000,
    rotary_base=1e6,
    eps=1e-5,
)


class Experts(nn.Module):
    """A layer's feed-forward part: (batch, length, hidden) to the same. The tokens of all samples
    divide into groups."""

    mesh: lazyxla.Mesh | None = None
    """With the axes "expert" and "data", over which experts and groups are split."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.config = config
        inner = config.experts, config.hidden, config.intermediate
        outer = config.experts, config.intermediate, config.hidden
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.gate = nn.Parameter(torch.empty(inner))
        self.up = nn.Parameter(torch.empty(inner))
        self.down = nn.Parameter(torch.empty(outer))
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        groups = x.reshape(-1, self.config.group, self.config.hidden)
        places, shares = self.route(groups)
        given = self.by_group(torch.einsum("gtec,gth->egch", places, groups))
        given = self.by_expert(given)
        gate = self.by_expert(torch.einsum("egch,ehi->egci", given, self.gate))
        up = self.by_expert(torch.einsum("egch,ehi->egci", given, self.up))
        made = torch.einsum("egci,eih->egch", functional.silu(gate) * up, self.down)
        made = self.by_group(self.by_expert(made))
        return torch.einsum("gtec,egch->gth", shares, made).view_as(x)

    def route(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Which of an expert's places each token takes, and the same times the expert's share in
        the token's result, both (groups, tokens, experts, capacity)."""
        config = self.config
        scores, chosen = self.router(groups).float().topk(config.chosen)
        numbers = torch.arange(config.experts, device=groups.device)
        takes = chosen.mT.unsqueeze(-1) == numbers  # (groups, chosen, tokens, experts)
        # All first choices come before the second ones.
        count = takes.flatten(1, 2).int().cumsum(1, dtype=torch.int32).view_as(takes)
        free = torch.arange(1, config.capacity + 1, device=groups.device)
        places = takes.unsqueeze(-1) & (count.unsqueeze(-1) == free)
        shares = scores.softmax(-1).mT[..., None, None] * places
        return places.sum(1).to(groups.dtype), shares.sum(1).to(groups.dtype)

    def by_group(self, x: Tensor) -> Tensor:
        """x (experts, groups, ...), each group where its tokens are."""
        return self.split(x, None, ("data", "expert"))

    def by_expert(self, x: Tensor) -> Tensor:
        """x (experts, groups, ...), each expert's part where the expert is. What is not told the
        partitioner might add up in parts, rather than exchange tokens or gather weights."""
        return self.split(x, "expert", "data")

    def split(self, x: Tensor, experts: str | None, groups: str | tuple[str, str]) -> Tensor:
        if self.mesh is None:
            return x
        return lazyxla.constrain(x, self.mesh, (experts, groups, "?", "?"))


def use_experts(model: Decoder, config: MixtralConfig) -> None:
    """Gives each layer of a decoder experts in place of its feed-forward part."""
    for layer in model.layers:
        layer.feed_forward = Experts(config)


def shard_experts(model: nn.Module, mesh: lazyxla.Mesh) -> None:
    """Splits experts over the mesh's "expert", and the weights of each over its "data"."""
    for part in model.modules():
        if isinstance(part, Experts):
            part.mesh = mesh
            for weight in (part.gate, part.up, part.down):
                lazyxla.shard(weight, mesh, ("expert", "data"))
