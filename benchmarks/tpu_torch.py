"""The models of tpu.py in PyTorch, at the sizes at which tpu_jax.py writes them by hand."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models import MODELS as NETWORKS
from examples.decoder_model import Decoder, DecoderConfig, next_token_loss
from examples.torchvision_import import import_torchvision

MODELS = ("decoder", "resnet50", "bert", "vit")
DTYPES = ("bfloat16", "float32", "autocast")
DECODER = DecoderConfig(
    hidden=1024, layers=4, heads=16, kv_heads=8, intermediate=4096, max_length=1024
)
BATCH = 8
CLASSES = 1000
RATE = 1e-3

_Made = tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]
"""A model, a batch, and the loss of both."""


class Training(NamedTuple):
    """A model and a batch without data, and what makes the step of the model's copy."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    step: Callable[[nn.Module], Callable[..., Tensor]]


def training(name: str, dtype: str, layers: int | None = None) -> Training:
    """A training step of a network with Adam; `layers`, if not the network's own number."""
    with torch.device("meta"):
        model, inputs, loss = _decoder(layers) if name == "decoder" else _network(name, layers)
    if dtype == "bfloat16":
        model.bfloat16()
        inputs = tuple(x.bfloat16() if x.is_floating_point() else x for x in inputs)

    def make_step(model: nn.Module) -> Callable[..., Tensor]:
        optimizer = torch.optim.Adam(model.parameters(), lr=RATE)

        def step(*inputs: Tensor) -> Tensor:
            with torch.autocast("lazyxla", enabled=dtype == "autocast"):
                value = loss(model, *inputs)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value

        return step

    return Training(model, inputs, make_step)


def decoder_config(layers: int | None = None) -> DecoderConfig:
    """The decoder's, with `layers` if not its own number."""
    return DECODER if layers is None else dataclasses.replace(DECODER, layers=layers)


def _decoder(layers: int | None) -> _Made:
    config = decoder_config(layers)
    tokens = torch.empty(BATCH, config.max_length, dtype=torch.int64)
    return Decoder(config), (tokens, tokens), lambda m, x, y: next_token_loss(m(x), y)


def _network(name: str, layers: int | None) -> _Made:
    network = NETWORKS[name]
    model = network.make() if name == "resnet50" else _transformer(name, layers)
    return model, network.batch("meta"), network.loss


def _transformer(name: str, layers: int | None) -> nn.Module:
    """Without dropout, whose random numbers would be another comparison."""
    import_torchvision()  # before transformers does
    import transformers

    sizes: dict[str, Any] = {} if layers is None else {"num_hidden_layers": layers}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    config = transformers.ViTConfig(num_labels=CLASSES, **sizes)
    return transformers.ViTForImageClassification(config)


@contextlib.contextmanager
def attention_by(way: str) -> Iterator[None]:
    """Within it attention is written out as matrix products ("products"), or left to lazyxla."""
    if way == "default":
        yield
        return
    with mock.patch.object(functional, "scaled_dot_product_attention", attention):
        yield


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of queries (N, H, S, D) to keys and values (N, G, T, D) as models write it out."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (_repeated(x, groups) for x in (key, value))
    scores = torch.matmul(query, key.transpose(2, 3)) * (query.shape[-1] ** -0.5)
    if is_causal:
        rows, columns = scores.shape[-2:]
        seen = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    if attn_mask is not None:
        scores = scores + attn_mask
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = functional.dropout(weights, dropout_p)
    return torch.matmul(weights, value)


def _repeated(x: Tensor, groups: int) -> Tensor:
    """Keys or values (N, G, T, D), each `groups` times: (N, G * groups, T, D)."""
    samples, heads, rows, size = x.shape
    wide = x[:, :, None].expand(samples, heads, groups, rows, size)
    return wide.reshape(samples, heads * groups, rows, size)
