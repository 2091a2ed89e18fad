"""Programs for many devices, compiled by the TPU's compiler for devices that are not there."""

from __future__ import annotations

import torch
from torch import nn

import lazyxla
from tests.support import DEVICE, needs_libtpu

WIDTH = 512


@needs_libtpu
def test_a_fully_sharded_step_for_eight_chips() -> None:
    mesh = lazyxla.Mesh((8,), ("data",))
    layers = nn.Linear(WIDTH, 4 * WIDTH), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
    model = nn.Sequential(*layers)
    lazyxla.fully_shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    x = lazyxla.shard(torch.randn(64, WIDTH), mesh, ("data",))

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        lazyxla.sync()

    step()
    with lazyxla.aot.capture("v5e:2x4") as programs:
        step()
    assert model[0].weight.device.type == DEVICE
    memory = programs[-1].compile().memory_stats()
    # An eighth of the parameters and of two states for each.
    parameters = sum(p.numel() for p in model.parameters()) * 4
    assert memory["arguments"] < 1.05 * 3 * parameters / 8
    assert memory["aliased"] > 0.95 * 3 * parameters / 8
