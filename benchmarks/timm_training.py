"""A training step of twenty of timm's networks on the CPU, lazily, beside PyTorch's eager step.

    pip install --no-deps timm safetensors huggingface_hub pyyaml
    python benchmarks/timm_training.py                 # all, about ten minutes
    python benchmarks/timm_training.py resnet18 vit_tiny_patch16_224

Both sides run in one process, on the same number of threads, a few steps of each in turns; a figure
is the best of its turns. Batch 2, SGD with momentum.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import common  # noqa: F401, for the path to the examples
import torch
from torch.nn import functional as F

import lazyxla
from examples.torchvision_import import import_torchvision

MODELS = (
    *("resnet18", "resnet26", "resnest14d", "res2net50_14w_8s", "regnetx_002", "densenet121"),
    *("mobilenetv3_small_100", "efficientnet_b0", "ghostnet_100", "edgenext_xx_small"),
    *("convnext_atto", "coatnet_pico_rw_224", "mobilevit_xxs", "levit_128s", "poolformer_s12"),
    *("vit_tiny_patch16_224", "deit_tiny_patch16_224", "swin_tiny_patch4_window7_224"),
    *("xcit_nano_12_p16_224", "mixer_s32_224"),
)
BATCH, CLASSES = 2, 100
TURNS, STEPS = 4, 3


class Times(NamedTuple):
    """In milliseconds per step: on the wall, and of all threads."""

    wall: float
    processor: float


def make_step(name: str, device: str) -> Callable[[], torch.Tensor]:
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=CLASSES)
    x = torch.randn(BATCH, *model.default_cfg["input_size"]).to(device)
    labels = torch.randint(CLASSES, (BATCH,)).to(device)
    model = model.to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        if device != "cpu":
            lazyxla.sync()
        return loss

    return step


def measure(step: Callable[[], torch.Tensor]) -> Times:
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        loss = step()
    loss.item()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return Times(wall / STEPS * 1e3, processor / STEPS * 1e3)


def best(turns: list[Times]) -> Times:
    return Times(min(t.wall for t in turns), min(t.processor for t in turns))


def compare(name: str) -> tuple[Times, Times]:
    """The best turns of lazyxla, and of PyTorch."""
    sides = [make_step(name, device) for device in ("lazyxla", "cpu")]
    for step in sides:
        for _ in range(4):
            step().item()
    turns = [[measure(step) for step in sides] for _ in range(TURNS)]
    ours, theirs = (best([turn[side] for turn in turns]) for side in (0, 1))
    return ours, theirs


def main() -> None:
    import_torchvision()  # before timm does
    logs: list[float] = []
    print(f"{'step, ms':30} lazyxla  PyTorch  ratio, and of processor time")
    for name in sys.argv[1:] or MODELS:
        ours, theirs = compare(name)
        ratio = ours.wall / theirs.wall
        logs.append(math.log(ratio))
        processor = ours.processor / theirs.processor
        print(f"{name:30} {ours.wall:7.1f}  {theirs.wall:7.1f}  {ratio:.2f} {processor:.2f}")
        sys.stdout.flush()
    print(
        f"geometric mean {math.exp(sum(logs) / len(logs)):.2f}, largest {math.exp(max(logs)):.2f}"
    )


if __name__ == "__main__":
    main()
