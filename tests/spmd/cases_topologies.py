"""Programs for many devices, compiled by the TPU's compiler for devices that are not there."""

from __future__ import annotations

import pytest
import torch
from models import MESH, PLANS, Mlp, Transformer, batches
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


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x2", "v6e:2x4"])
@pytest.mark.parametrize("plan", sorted(PLANS))
@pytest.mark.parametrize("model", [Mlp, Transformer])
def test_training_steps(model: type[nn.Module], plan: str, topology: str) -> None:
    """Those of cases_training.py: one program each, which exchanges what its plan makes it to."""
    torch.manual_seed(0)
    trained = lazyxla.shard(model(), MESH, PLANS[plan])
    optimizer = torch.optim.AdamW(trained.parameters())
    [(x, y)] = batches(model, 1)
    x, y = (lazyxla.shard(each, MESH, ("data",)) for each in (x, y))

    def step() -> None:
        trained.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        lazyxla.sync()

    step()
    with lazyxla.aot.capture(topology) as programs:
        step()
    [program] = programs
    compiled = program.compile()
    assert compiled.fits
    kinds = {(row.kind, row.axes) for row in compiled.collectives}
    assert any("data" in axes for _, axes in kinds)  # gradients are summed
    if "tensor" in plan:
        assert any("model" in axes for _, axes in kinds)
    if "fsdp" in plan:
        assert any(kind == "all-gather" for kind, _ in kinds)


@needs_libtpu
def test_random_numbers_are_made_where_they_are_kept() -> None:
    """No device has more of them than its part, nor of what they are computed from."""
    mesh = lazyxla.Mesh((8,), ("data",))
    size = 1 << 24
    x = lazyxla.shard(torch.empty(size, device=DEVICE), mesh, ("data",))
    with lazyxla.aot.capture("v5e:2x4") as programs:
        x.normal_()
        lazyxla.sync()
    memory = programs[-1].compile().memory_stats()
    assert memory["outputs"] == size * 4 // 8
    assert memory["temporary"] < size * 4 // 8
