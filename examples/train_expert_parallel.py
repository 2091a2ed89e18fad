"""Trains a decoder whose feed-forward parts are mixtures of experts that lie on different devices:
each token is sent to the two experts that its router prefers, and back (expert parallelism).

LAZYXLA_CPU_DEVICES=8 python examples/train_expert_parallel.py --data 4 --expert 2
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mesh_trainer
import torch
from decoder_model import Decoder, DecoderConfig, next_token_loss
from mesh_trainer import constrain_result
from torch import Tensor, nn
from torch.nn import functional
from trainer import Summary

import lazyxla


class Router(nn.Module):
    """Chooses experts for tokens (batch, length, hidden), as in GShard (Lepikhin et al., 2020).

    Each expert takes up to ``capacity`` tokens of a sequence, so that all shapes are fixed: first
    choices before second ones, and earlier tokens before later ones. What is left over goes to no
    expert.
    """

    def __init__(self, hidden: int, experts: int, choices: int, spare: float) -> None:
        super().__init__()
        self.scores = nn.Linear(hidden, experts, bias=False)
        self.choices, self.spare = choices, spare

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weight of each token in each place of each expert (batch, length, experts, capacity),
        and the loss that is least, 1, if all experts get equally many tokens."""
        probabilities = self.scores(x).softmax(-1)
        length, experts = probabilities.shape[1:]
        capacity = math.ceil(self.spare * self.choices * length / experts)
        weights, chosen = probabilities.topk(self.choices)
        weights = weights / weights.sum(-1, keepdim=True)

        # (batch, choices * length, experts): how many came before to the same expert.
        wants = functional.one_hot(chosen.transpose(1, 2).flatten(1), experts)
        place = wants.cumsum(1) - wants
        wants = (wants * (place < capacity)).to(x.dtype)
        place = (place * wants.long()).sum(-1)
        places = functional.one_hot(place, capacity).to(x.dtype)
        weights = weights.transpose(1, 2).flatten(1)
        combine = torch.einsum("bt,bte,btc->btec", weights, wants, places)
        combine = combine.unflatten(1, (self.choices, length)).sum(1)

        share = functional.one_hot(chosen[..., 0], experts).to(x.dtype).mean((0, 1))
        balance = experts * (share * probabilities.mean((0, 1))).sum()
        return combine, balance


class Experts(nn.Module):
    """Feed-forward parts side by side: tokens (experts, batch, capacity, hidden), each expert's by
    its own weights."""

    def __init__(self, config: DecoderConfig, experts: int) -> None:
        super().__init__()
        hidden, inner = config.hidden, config.intermediate
        self.up = nn.Parameter(torch.randn(experts, hidden, inner) / math.sqrt(hidden))
        self.down = nn.Parameter(torch.randn(experts, inner, hidden) / math.sqrt(inner))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.silu(torch.einsum("ebch,ehi->ebci", x, self.up))
        return torch.einsum("ebci,eih->ebch", x, self.down)


class Mixture(nn.Module):
    """The feed-forward part of a layer, of which each token uses some experts."""

    balance: Tensor  # of the last forward

    def __init__(self, config: DecoderConfig, experts: int) -> None:
        super().__init__()
        self.router = Router(config.hidden, experts, choices=2, spare=1.25)
        self.send = nn.Identity()
        self.experts = Experts(config, experts)

    def forward(self, x: Tensor) -> Tensor:
        combine, self.balance = self.router(x)
        sent = self.send(torch.einsum("blec,blh->ebch", (combine > 0).to(x.dtype), x))
        return torch.einsum("blec,ebch->blh", combine, self.experts(sent))


class MixtureDecoder(Decoder):
    """The decoder of the other examples with mixtures of experts."""

    def __init__(self, config: DecoderConfig, experts: int) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.feed_forward = Mixture(config, experts)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The next token's, and a little of what balances the experts."""
        balance = torch.stack([layer.feed_forward.balance for layer in self.layers]).mean()
        return next_token_loss(logits, targets) + 0.01 * balance


def split_experts(model: MixtureDecoder, mesh: lazyxla.Mesh) -> None:
    """All devices share the batch; each has some experts, and everything else.

    What experts get and yield, (experts, batch, capacity, hidden), is split by samples where
    tokens are sent and received, and by experts in between: twice the devices exchange tokens
    (all-to-all).
    """
    tokens = ("data", "expert")
    by_samples, by_experts = (None, tokens), ("expert", "data")
    lazyxla.shard(model, mesh, lambda name, _: ("expert",) if ".experts." in name else ())
    constrain_result(model.embedding, mesh, (tokens,))
    for layer in model.layers:
        constrain_result(layer.feed_forward.send, mesh, by_samples)
        constrain_result(layer.feed_forward.send, mesh, by_experts)
        constrain_result(layer.feed_forward.experts, mesh, by_experts)
        constrain_result(layer.feed_forward.experts, mesh, by_samples)
        constrain_result(layer, mesh, (tokens,))


def main(argv: Sequence[str] | None = None) -> tuple[Summary, MixtureDecoder]:
    options = mesh_trainer.parser(__doc__, "expert")
    options.add_argument("--experts", type=int, default=8, help="experts per layer")
    args = options.parse_args(argv)
    mesh = mesh_trainer.mesh_of(args)
    torch.manual_seed(args.seed)
    model = MixtureDecoder(mesh_trainer.config_of(args), args.experts)
    split_experts(model, mesh)
    batches = lazyxla.Sharding(mesh, (("data", "expert"),))
    summary = mesh_trainer.train(args, model, model.loss, batches)
    print(lazyxla.visualize(model.layers[0].feed_forward.experts.up))
    return summary, model


if __name__ == "__main__":
    main()
