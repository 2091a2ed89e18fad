"""Layers in a loop over many devices: parameters stay spread, and are gathered layer by layer."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from helpers import spec_of
from models import BATCH, LENGTH, MESH, WIDTH, Block
from torch import nn

import lazyxla
from tests.support import DEVICE, counted

STEPS = 5


class Deep(nn.Module):
    def __init__(self, layers: int, remat: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(Block() for _ in range(layers)), nn.Linear(WIDTH, 8)
        self.remat = remat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.remat is not None:
            x = lazyxla.scan_layers(self.layers, x, remat=self.remat)
        else:
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


def spread(model: nn.Module, plan: str | None) -> nn.Module:
    if plan is None:
        return model.to(DEVICE)
    if plan == "fsdp x tp":
        up, down = lazyxla.ColwiseParallel("model"), lazyxla.RowwiseParallel("model")
        lazyxla.parallelize(model, MESH, {"layers.*.mlp.up": up, "layers.*.mlp.down": down})
    return lazyxla.fully_shard(model, MESH, "data")


def train(plan: str | None, remat: str | None) -> tuple[nn.Module, dict[str, Any], list[Any]]:
    """The model, what came of the steps, and what each compiled and ran."""
    model = spread(Deep(3, remat), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator, counts = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
        x = x.to(DEVICE) if plan is None else lazyxla.shard(x, MESH, ("data",))
        lazyxla.sync()
        with counted() as n:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            lazyxla.sync()
        counts.append((n.compiles, n.executions))
    result = {name: p.detach().cpu() for name, p in model.named_parameters()}
    result |= {f"{name}.grad": p.grad.cpu() for name, p in model.named_parameters()}
    return model, {**result, "loss": loss.detach().cpu()}, counts


@cache
def reference() -> dict[str, Any]:
    """The layers one by one, on one device."""
    return train(None, None)[1]


@pytest.mark.parametrize(
    ("plan", "remat"), [("fsdp", "none"), ("fsdp", "full"), ("fsdp x tp", "full")]
)
def test_training(plan: str, remat: str) -> None:
    model, found, counts = train(plan, remat)
    torch.testing.assert_close(found, reference())
    assert counts[2:] == [(0, 1)] * (STEPS - 2)
    weight = model.layers[1].mlp.up.weight
    assert spec_of(weight) == (("data", None) if plan == "fsdp" else ("model", "data"))
    assert spec_of(weight.grad) == spec_of(weight)


def test_parameters_are_gathered_in_the_loops() -> None:
    """A gathered parameter is one layer's, never the stack of all."""
    with lazyxla.aot.capture() as programs:
        model = spread(Deep(6, "full"), "fsdp")
        x = lazyxla.shard(torch.randn(BATCH, LENGTH, WIDTH), MESH, ("data",))
        lazyxla.sync()
        model(x).square().mean().backward()
        lazyxla.sync()
    text = programs[-1].compile().optimized_hlo()
    gathered = re.findall(r"= f32\[([\d,]*)\]\S* all-gather\(", text)
    assert f"{4 * WIDTH},{WIDTH}" in gathered
    sizes = [torch.Size(map(int, shape.split(","))).numel() for shape in gathered]
    assert max(sizes) == 4 * WIDTH * WIDTH
