"""The models that the training tests run: small instances of what people train.

Every entry makes a model on the CPU, a batch for step i, and the loss of one batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests import vision  # before transformers, which imports torchvision

Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    lr: float = 0.01
    reads: int = 0  # values that the model itself reads in a step, each of which runs a program


def _classify(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def _images(size: int, classes: int, batch: int = 4, channels: int = 3) -> Callable[[], Batch]:
    return lambda: (
        torch.randn(batch, channels, size, size),
        torch.randint(0, classes, (batch,)),
    )


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 5)
    )


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 10),
    )


def torchvision_model(name: str, **kwargs: Any) -> nn.Module:
    return getattr(vision.models, name)(num_classes=10, **kwargs)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.inner = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GELU())
        self.up = nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1)
        self.head = nn.Conv2d(16, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        return self.head(torch.cat([skip, self.up(self.inner(skip))], dim=1))


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.rnn = cell(16, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(tokens))[0][:, -1])


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(100, 8, mode=mode) for mode in ("sum", "mean", "max")
        )
        self.top = nn.Sequential(nn.Linear(3 * 8 + 4, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        features = [bag(ids) for bag in self.bags]
        return self.top(torch.cat([dense, *features], dim=1)).squeeze(1)


class DiffusionBlock(nn.Module):
    """A residual block with group norm, a time embedding and self-attention."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, width), nn.GroupNorm(4, width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(8, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(t)[:, :, None, None]
        h = self.conv2(F.dropout(F.silu(self.norm2(h)), 0.0)) + x
        flat = h.flatten(2).transpose(1, 2)
        return h + self.attention(flat, flat, flat)[0].transpose(1, 2).view_as(h)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class DecoderLayer(nn.Module):
    """Grouped-query attention with rotary embeddings and a SwiGLU feed-forward."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v = nn.Linear(width, kv_heads * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = self.size // 2
        angle = torch.arange(x.shape[-2], device=x.device)[:, None] / 10000 ** (
            torch.arange(half, device=x.device) / half
        )
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        h = self.norm1(x)
        q, k, v = (
            proj(h).view(batch, length, -1, self.size).transpose(1, 2)
            for proj in (self.q, self.k, self.v)
        )
        q, k = self._rotate(q), self._rotate(k)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(out.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, vocabulary: int = 64, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*(DecoderLayer(width, 4, 2) for _ in range(2)), RMSNorm(width))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(tokens)))


def _next_token(model: nn.Module, batch: Batch) -> torch.Tensor:
    (tokens,) = batch
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=60, n_positions=32, n_embd=32, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        image_size=16, patch_size=4, num_labels=5,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config)


def _tokens(vocabulary: int, length: int, batch: int = 4) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length))


CASES: dict[str, Case] = {
    "mlp": Case(mlp, lambda: (torch.randn(8, 16), torch.randint(0, 5, (8,))), _classify),
    "lenet": Case(lenet, _images(28, 10, channels=1), _classify),
    "resnet18": Case(lambda: torchvision_model("resnet18"), _images(32, 10), _classify),
    # Without training before, its steps multiply any difference by a hundred; tiny steps keep the
    # two on one path, so that each step's gradients can be compared to the last digits.
    "resnet50": Case(lambda: torchvision_model("resnet50"), _images(64, 10), _classify, lr=1e-6),
    "mobilenet_v2": Case(
        lambda: torchvision_model("mobilenet_v2", dropout=0.0), _images(64, 10), _classify
    ),
    "unet": Case(
        UNet, lambda: (torch.randn(2, 3, 16, 16), torch.randint(0, 5, (2, 16, 16))), _classify
    ),
    "vit": Case(
        vit,
        _images(16, 5),
        lambda m, b: m(pixel_values=b[0], labels=b[1]).loss,
    ),
    "bert": Case(
        bert,
        lambda: (_tokens(60, 12), torch.ones(4, 12, dtype=torch.long), torch.randint(0, 3, (4,))),
        lambda m, b: m(input_ids=b[0], attention_mask=b[1], labels=b[2]).loss,
        reads=1,  # transformers asks whether the mask hides anything
    ),
    "gpt2": Case(
        gpt2,
        lambda: (_tokens(60, 12),),
        lambda m, b: m(input_ids=b[0], labels=b[0]).loss,
    ),
    "lstm": Case(
        lambda: Recurrent(nn.LSTM), lambda: (_tokens(50, 6), torch.randint(0, 7, (4,))), _classify
    ),
    "gru": Case(
        lambda: Recurrent(nn.GRU), lambda: (_tokens(50, 6), torch.randint(0, 7, (4,))), _classify
    ),
    "decoder": Case(Decoder, lambda: (_tokens(64, 17),), _next_token),
    "recommender": Case(
        Recommender,
        lambda: (torch.randn(8, 4), torch.randint(0, 100, (8, 5)), torch.rand(8)),
        lambda m, b: F.binary_cross_entropy_with_logits(m(b[0], b[1]), b[2]),
    ),
    "diffusion": Case(
        DiffusionBlock,
        lambda: (torch.randn(2, 16, 8, 8), torch.randn(2, 8), torch.randn(2, 16, 8, 8)),
        lambda m, b: F.mse_loss(m(b[0], b[1]), b[2]),
    ),
}
