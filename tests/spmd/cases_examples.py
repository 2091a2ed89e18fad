"""The examples on a mesh train as on one device, in one program per step, of which each device
computes its own part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from helpers import one_process, spec_of
from torch import nn

import lazyxla

Example = Callable[[str], Any]

ARGUMENTS = ["--steps", "5", "--batch", "8", "--length", "32", "--vocab", "256", "--log-every", "1"]


@cache
def on_the_cpu() -> list[float]:
    """The losses of the decoder that most of the examples train, in plain PyTorch."""
    import train_decoder

    options = ["--small", "--optimizer", "adamw", "--lr", "0.001", "--device", "cpu"]
    losses: list[float] = train_decoder.main([*ARGUMENTS, *options]).losses
    return losses


def check(summary: Any, model: nn.Module, expected: list[float]) -> None:
    """Losses are those expected, and fall; each step is one program, compiled at most twice."""
    # Losses are float32: its tolerances, not those of Python's numbers.
    torch.testing.assert_close(torch.tensor(summary.losses), torch.tensor(expected))
    assert summary.losses[-1] < summary.losses[0] - 1
    assert summary.last_compile <= 2
    states = 2 * len(list(model.parameters()))  # the first step makes each by a program of its own
    assert summary.executions == summary.steps + states
    assert summary.fallbacks == 0


def test_fully_sharded(example: Example) -> None:
    summary, model = example("train_fsdp").main(ARGUMENTS)
    check(summary, model, on_the_cpu())
    assert spec_of(model.layers[0].feed_forward.up.weight) == ("data", None)
    assert spec_of(model.layers[0].feed_forward.down.weight) == (None, "data")


def test_tensor_parallel(example: Example) -> None:
    summary, model = example("train_tensor_parallel").main(ARGUMENTS)
    check(summary, model, on_the_cpu())
    layer = model.layers[1]
    for part in (layer.attention.query, layer.attention.key, layer.feed_forward.up, model.head):
        assert spec_of(part.weight) == ("model", None)
    for part in (layer.attention.out, layer.feed_forward.down):
        assert spec_of(part.weight) == (None, "model")
    assert spec_of(layer.attention_norm.weight) == (None,)


def test_context_parallel(example: Example) -> None:
    module = example("train_context_parallel")
    summary, model = module.main([*ARGUMENTS, "--sequence", "4"])
    check(summary, model, on_the_cpu())
    assert spec_of(model.layers[0].attention.query.weight) == (None, None)
    mesh = lazyxla.Mesh((2, 4), ("data", "sequence"))
    tokens = torch.zeros(8, 32, dtype=torch.int64)
    logits = model(lazyxla.shard(tokens, mesh, ("data", "sequence")))
    assert spec_of(logits) == ("data", "sequence", None)


@one_process
def test_expert_parallel(example: Example) -> None:
    main = example("train_expert_parallel").main
    alone, _ = main([*ARGUMENTS, "--data", "1", "--expert", "1"])
    summary, model = main([*ARGUMENTS, "--expert", "4"])
    check(summary, model, alone.losses)
    mixture = model.layers[1].feed_forward
    for weight in (mixture.experts.up, mixture.experts.down):
        assert spec_of(weight) == ("expert", None, None)
    assert spec_of(mixture.router.scores.weight) == (None, None)


def test_tokens_beyond_an_experts_capacity_are_left_out(example: Example) -> None:
    router = example("train_expert_parallel").Router(4, experts=2, choices=1, spare=0.5)
    with torch.no_grad():
        router.scores.weight.copy_(torch.tensor([[8.0, 0, 0, 0], [-8.0, 0, 0, 0]]))
    x = torch.zeros(1, 8, 4)
    x[0, :, 0] = torch.tensor([1.0, 1, -1, 1, 1, -1, 1, 1])  # six for the first expert, two
    combine, balance = router(x)
    assert combine.shape == (1, 8, 2, 2)
    taken = [tuple(place) for place in combine[0].nonzero().tolist()]
    assert taken == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (5, 1, 1)]
    torch.testing.assert_close(balance.detach(), torch.tensor(2 * (0.75 * 0.75 + 0.25 * 0.25)))


def planned(
    module: str, example: Example, shape: tuple[int, int], axis: str, spec: tuple[Any, ...]
) -> lazyxla.aot.CompiledProgram:
    """The program of a forward and backward of an example's model, small, with two layers."""
    decoder, trained = example("decoder_model"), example(module)
    config = dataclasses.replace(
        decoder.SMALL, vocab=64, max_length=32, hidden=64, heads=4, kv_heads=2, intermediate=96
    )
    mesh = lazyxla.Mesh(shape, ("data", axis))
    with lazyxla.aot.capture() as programs:
        if axis == "expert":
            model = trained.MixtureDecoder(config, experts=4)
            trained.split_experts(model, mesh)
            loss = model.loss
        else:
            model = decoder.Decoder(config)
            spread = trained.split_layers if axis == "model" else trained.split_sequences
            spread(model, mesh)
            loss = trained.next_token_loss
        tokens = lazyxla.shard(torch.zeros(8, 32, dtype=torch.int64), mesh, spec)
        lazyxla.sync()
        loss(model(tokens), tokens).backward()
        lazyxla.sync()
    return programs[-1].compile()


@one_process
@pytest.mark.parametrize(
    ("module", "shape", "axis", "spec", "kind", "count"),
    [
        # Hidden states before attention, feed-forward part and head, and where their gradients are.
        ("train_tensor_parallel", (4, 2), "model", ("data",), "all-gather", None),
        # Keys and values in each layer, and one of them again in its backward.
        ("train_context_parallel", (2, 4), "sequence", ("data", "sequence"), "all-gather", 6),
        # Tokens to the experts and back in each layer, and so their gradients.
        ("train_expert_parallel", (2, 4), "expert", (("data", "expert"),), "all-to-all", 8),
    ],
)
def test_each_device_computes_its_part(
    example: Example,
    module: str,
    shape: tuple[int, int],
    axis: str,
    spec: tuple[Any, ...],
    kind: str,
    count: int | None,
) -> None:
    alone = planned(module, example, (1, 1), axis, spec)
    spread = planned(module, example, shape, axis, spec)
    assert spread.flops < 1.05 * alone.flops / 8
    exchanged = {(r.kind, r.axes): r.count for r in spread.collectives if r.kind != "all-reduce"}
    assert set(exchanged) == {(kind, axis)}
    assert count is None or exchanged[kind, axis] == count
