"""A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder. ``kv_heads`` divides ``heads``, which divides ``hidden``."""

    hidden: int = 1024
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    intermediate: int = 32 * 1024
    vocab: int = 32000
    max_length: int = 512
    rotary_base: float = 10000.0
    eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SMALL = DecoderConfig(hidden=256, intermediate=1024, vocab=2048, max_length=128)


def rotary_tables(config: DecoderConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angles, each (max_length, head_dim)."""
    exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
    angles = torch.outer(torch.arange(config.max_length), config.rotary_base**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (i, i + head_dim/2) of ``x`` (..., length, head_dim) by its angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention in which several query heads share one key and value head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        shared = config.kv_heads * config.head_dim
        self.query = nn.Linear(config.hidden, config.hidden, bias=False)
        self.key = nn.Linear(config.hidden, shared, bias=False)
        self.value = nn.Linear(config.hidden, shared, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        query = rotate(heads(self.query(x)), cos, sin)
        key = rotate(heads(self.key(x)), cos, sin)
        y = functional.scaled_dot_product_attention(
            query, key, heads(self.value(x)), is_causal=True, enable_gqa=True
        )
        return self.out(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Attention and feed-forward part, each on normalised input and added to it."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.hidden, eps=config.eps)
        self.feed_forward = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """Tokens (batch, length), int64, to logits (batch, length, vocab)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.eps)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits (batch, length, vocab) against targets (batch, length)."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
