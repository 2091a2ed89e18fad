"""Networks at the sizes that people train, each with a batch and a loss; none knows of lazyxla."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.decoder_model import Decoder, DecoderConfig, next_token_loss
from examples.torchvision_import import import_torchvision

VOCABULARY = 1000
"""What the random tokens and labels of a batch are below; every network knows as many."""


class Training(NamedTuple):
    """What is trained. ``inputs`` are the shapes and dtypes of a batch, the first dimension its
    size; ``loss`` is given the network and a batch.
    """

    make: Callable[[], nn.Module]
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    loss: Callable[..., Tensor]

    def batch(self, device: torch.device | str, size: int | None = None) -> tuple[Tensor, ...]:
        """A random batch of ``size``, by default the network's own; on "meta" without values."""
        batch = []
        for (own_size, *rest), dtype in self.inputs:
            shape = (own_size if size is None else size, *rest)
            if dtype.is_floating_point:
                batch.append(torch.randn(shape, dtype=dtype, device=device))
            else:
                batch.append(torch.randint(VOCABULARY, shape, dtype=dtype, device=device))
        return tuple(batch)


def _vision(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torchvision = import_torchvision()
        if torchvision is None:
            raise RuntimeError("torchvision is not installed")
        return getattr(torchvision.models, name)()

    return make


def _transformers(model: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import_torchvision()  # before transformers does
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**sizes))

    return make


def _integers(*shape: int) -> tuple[tuple[int, ...], torch.dtype]:
    return shape, torch.int64


def _floats(*shape: int) -> tuple[tuple[int, ...], torch.dtype]:
    return shape, torch.float32


def _classify(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def _images(name: str) -> Training:
    return Training(_vision(name), (_floats(32, 3, 224, 224), _integers(32)), _classify)


MODELS: dict[str, Training] = {
    "decoder": Training(
        lambda: Decoder(DecoderConfig()),
        (_integers(16, 512), _integers(16, 512)),
        lambda model, tokens, targets: next_token_loss(model(tokens), targets),
    ),
    "gpt2": Training(
        _transformers("GPT2LMHeadModel", "GPT2Config"),
        (_integers(8, 512),),
        lambda model, tokens: model(input_ids=tokens, labels=tokens).loss,
    ),
    "bert": Training(
        _transformers("BertForMaskedLM", "BertConfig"),
        (_integers(16, 128), _integers(16, 128)),
        lambda model, tokens, labels: model(input_ids=tokens, labels=labels).loss,
    ),
    "vit": Training(
        _transformers("ViTForImageClassification", "ViTConfig", num_labels=VOCABULARY),
        (_floats(32, 3, 224, 224), _integers(32)),
        lambda model, images, labels: model(pixel_values=images, labels=labels).loss,
    ),
    "resnet18": _images("resnet18"),
    "resnet50": _images("resnet50"),
    "mobilenet_v2": _images("mobilenet_v2"),
}
