"""Training steps of whole models, compiled for TPUs: ``python -m tests.tpu.training``.

Needs the TPU's compiler, libtpu, and no TPU. Prints what the compiler tells of each, and ends with
status 1 if one is refused. A time that begins with ">" is a lower bound.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from examples.decoder_model import Decoder, DecoderConfig, next_token_loss
from lazyxla import aot
from tests import vision

TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2")


class Training(NamedTuple):
    """``loss`` is given the model and the inputs, which are on "meta"."""

    make: Callable[[], nn.Module]
    inputs: tuple[torch.Tensor, ...]
    loss: Callable[..., torch.Tensor]

    def compile(self, topology: str | aot.Topology) -> aot.CompiledProgram:
        with torch.device("meta"):
            model = self.make()
        step = train_step(self.loss)
        return aot.compile(model, self.inputs, topology=topology, train_step=step)


def train_step(loss: Callable[..., torch.Tensor]) -> Callable[[nn.Module], Callable[..., Any]]:
    """One step of AdamW under autocast to bfloat16."""

    def training(model: nn.Module) -> Callable[..., torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(*inputs: torch.Tensor) -> torch.Tensor:
            with torch.autocast("lazyxla"):
                value = loss(model, *inputs)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value

        return step

    return training


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _labels(*shape: int) -> torch.Tensor:
    return _meta(*shape, dtype=torch.int64)


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig())


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(num_labels=1000))


def _classify(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(images), labels)


MODELS: dict[str, Training] = {
    "decoder": Training(
        lambda: Decoder(DecoderConfig()),
        (_labels(16, 512), _labels(16, 512)),
        lambda model, tokens, targets: next_token_loss(model(tokens), targets),
    ),
    "resnet50": Training(vision.models.resnet50, (_meta(32, 3, 224, 224), _labels(32)), _classify),
    "bert": Training(
        _bert,
        (_labels(16, 128), _labels(16, 128)),
        lambda model, tokens, labels: model(input_ids=tokens, labels=labels).loss,
    ),
    "vit": Training(
        _vit,
        (_meta(32, 3, 224, 224), _labels(32)),
        lambda model, images, labels: model(pixel_values=images, labels=labels).loss,
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topologies", nargs="+", default=TOPOLOGIES)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    arguments = parser.parse_args()
    failed = []
    print("model     topology     peak GiB  of GiB  TFLOPs  estimated ms  of peak  compiled in")
    for model in arguments.models:
        for topology in arguments.topologies:
            begin = time.monotonic()
            try:
                program = MODELS[model].compile(topology)
            except (RuntimeError, ValueError) as error:
                failed.append(f"{model}, {topology}: {error}")
                continue
            took = time.monotonic() - begin
            bound = ">" if program.estimated_seconds == program.least_seconds else ""
            estimate = f"{bound}{program.estimated_seconds * 1e3:.2f}"
            print(
                f"{model:<10}{topology:<11}{program.memory_stats()['peak'] / 2**30:10.2f}"
                f"{program.memory_bytes / 2**30:8.2f}{program.flops / 1e12:8.2f}"
                f"{estimate:>14}{program.share_of_peak_flops:9.1%}"
                f"{took:10.0f} s",
                flush=True,
            )
    print(*failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
