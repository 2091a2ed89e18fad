"""The examples train: the loss falls as on the CPU, in one compiled program per step."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import pytest
import torch
import torch._dynamo

import lazyxla
import lazyxla.dynamo
from tests.support import needs_libtpu, programs


@pytest.fixture
def named_backend() -> None:
    """``torch.compile`` finds the backend by name also where lazyxla is not installed."""
    if "lazyxla" not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(lazyxla.dynamo.backend, name="lazyxla")
    torch._dynamo.reset()


def _assert_close(ours: list[float], theirs: list[float]) -> None:
    """Losses are float32: its tolerances, not those of Python's numbers."""
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs))


# Tensors of an optimizer's state, two for each parameter, or ResNet-18's 62 momenta: the first step
# makes each by a program of its own.
STATES = range(0, 64, 2)


def check_steps(summary: Any) -> None:
    """One execution per step, no compile after the second step, nothing on the host."""
    assert all(math.isfinite(loss) for loss in summary.losses)
    assert summary.compiles > 0
    assert summary.last_compile <= 2
    assert summary.executions - summary.steps in STATES
    assert summary.fallbacks == 0


DECODER = ["--small", "--vocab", "256", "--length", "32"]


def test_decoder_learns(example: Any) -> None:
    summary = example("train_decoder").main([*DECODER, "--steps", "20", "--log-every", "5"])
    assert summary.losses[-1] < summary.losses[0] - 1
    check_steps(summary)


def test_decoder_losses_are_those_of_the_cpu(example: Any) -> None:
    main = example("train_decoder").main
    arguments = [*DECODER, "--steps", "4", "--log-every", "1"]
    expected = main([*arguments, "--device", "cpu"])
    assert expected.compiles == 0
    _assert_close(main(arguments).losses, expected.losses)


def test_schedule_and_step_count_do_not_recompile(example: Any) -> None:
    arguments = [*DECODER, "--steps", "6", "--optimizer", "adamw", "--schedule", "cosine"]
    check_steps(example("train_decoder").main(arguments))


def test_mnist_like_learns(example: Any) -> None:
    arguments = ["--steps", "120", "--lr", "0.005", "--log-every", "40"]
    summary, accuracy = example("train_mnist_like").main(arguments)
    assert summary.losses[-1] < 1.5
    assert accuracy > 0.5
    check_steps(summary)


def test_mnist_like_losses_are_those_of_the_cpu(example: Any) -> None:
    main = example("train_mnist_like").main
    arguments = ["--steps", "4", "--log-every", "1", "--batch", "8"]
    expected, _ = main([*arguments, "--device", "cpu"])
    summary, _ = main(arguments)
    _assert_close(summary.losses, expected.losses)


def test_resnet_trains(example: Any) -> None:
    if example("torchvision_import").import_torchvision() is None:
        pytest.skip("torchvision is not installed")
    arguments = ["--steps", "4", "--log-every", "1", "--batch", "2", "--size", "32"]
    summary = example("train_resnet").main(arguments)
    assert len(summary.losses) == 4
    check_steps(summary)


def test_resnet_trains_in_jax(example: Any) -> None:
    if example("torchvision_import").import_torchvision() is None:
        pytest.skip("torchvision is not installed")
    jax.config.update("jax_platforms", "cpu")
    shape = ["--steps", "3", "--batch", "4", "--size", "64"]
    ours = example("train_resnet_optax").main(shape)
    on_the_cpu = ["--schedule", "constant", "--lr", "0.02", "--log-every", "1", "--device", "cpu"]
    expected = example("train_resnet").main([*shape, *on_the_cpu]).losses
    # So small a batch makes much of rounding errors in its statistics.
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), rtol=1e-3, atol=1e-3)


MODES = ["eager", "fused", "eager-compile", "torch-compile"]


def _check_mode(mode: str, summary: Any, expected: Any) -> None:
    _assert_close(summary.losses, expected.losses)
    assert summary.rate > 0
    assert summary.fallbacks == 0
    per_step = summary.executions / summary.steps
    if mode in ("eager-compile", "torch-compile"):
        assert summary.executions - summary.steps in STATES
    elif mode == "fused":
        assert 2 <= per_step <= 40  # in two steps ResNet-18's 62 momenta are made, too
    else:
        assert per_step > 100


@pytest.mark.parametrize("mode", MODES)
def test_decoder_in_every_mode(example: Any, mode: str, named_backend: None) -> None:
    main = example("train_decoder").main
    arguments = [*DECODER, "--steps", "5", "--log-every", "1"]
    _check_mode(mode, main([*arguments, "--mode", mode]), main([*arguments, "--device", "cpu"]))


@pytest.mark.parametrize("mode", MODES)
def test_resnet_in_every_mode(example: Any, mode: str, named_backend: None) -> None:
    if example("torchvision_import").import_torchvision() is None:
        pytest.skip("torchvision is not installed")
    main = example("train_resnet").main
    # Smaller ones leave batch normalisation so few values that it makes much of rounding errors.
    arguments = ["--steps", "2", "--log-every", "1", "--batch", "4", "--size", "64"]
    _check_mode(mode, main([*arguments, "--mode", mode]), main([*arguments, "--device", "cpu"]))


@pytest.mark.parametrize("model", ["decoder", "resnet18"])
def test_inference(example: Any, model: str, named_backend: None) -> None:
    if model != "decoder" and example("torchvision_import").import_torchvision() is None:
        pytest.skip("torchvision is not installed")
    summary = example("inference").main(["--model", model, "--calls", "4"])
    assert (summary.compiles, summary.executions, summary.nodes_recorded) == (0, 4, 4)
    assert summary.rate > 0


def test_fsdp(example: Any) -> None:
    arguments = ["--data", "2", "--steps", "6", "--batch", "4", "--log-every", "3"]
    summary, _ = example("train_fsdp").main(arguments)
    assert summary.losses[-1] < summary.losses[0] - 0.5
    check_steps(summary)


def test_unknown_device_is_an_error_of_torch(example: Any) -> None:
    with pytest.raises(RuntimeError, match="device"):
        example("train_decoder").main([*DECODER, "--steps", "1", "--device", "nonsense"])


def test_generate(example: Any) -> None:
    lengths = ["--tokens", "24", "--prompts", "10", "10", "8"]
    with programs() as found:
        ours = example("generate").main(lengths)
    theirs = example("generate").main(["--device", "cpu", *lengths])
    assert [prompt.tokens for prompt in ours] == [prompt.tokens for prompt in theirs]
    # The first prompt: itself, a token, a token without what grows. The third: itself.
    assert len(found.large(60)) <= 4, found.sizes
    assert ours[1].compiles == 0
    assert ours[0].graphs_cut > 10


@needs_libtpu
@pytest.mark.parametrize(
    ("model", "axes"), [("small", ("data", "model")), ("small-mixtral", ("data", "expert"))]
)
def test_a_training_step_is_planned(example: Any, model: str, axes: tuple[str, str]) -> None:
    data, other = axes
    plan = example("plan_scaling").main(
        [
            *("--model", model, "--layers", "2", "--length", "128", "--topology", "v5e:2x2"),
            *("--mesh", f"{data}=2,{other}=2", "--batch", "4", "--remat", "full"),
        ]
    )
    assert plan.mesh == f"{data}=2, {other}=2"
    assert plan.fits
    assert set(axes) <= {row.axes for row in plan.collectives}
    if other == "expert":  # tokens go to their experts and back
        assert any(row.kind == "all-to-all" and other in row.axes for row in plan.collectives)


def test_experts_are_those_that_the_router_chooses(example: Any) -> None:
    mixtral = example("mixtral_model")
    config = mixtral.MixtralConfig(
        hidden=16, intermediate=32, experts=4, group=8, capacity_factor=2.0
    )
    experts = mixtral.Experts(config)
    x = torch.randn(2, 16, 16)
    scores, chosen = experts.router(x).topk(config.chosen)

    def feed_forward(token: torch.Tensor, i: int) -> torch.Tensor:
        inner = torch.nn.functional.silu(token @ experts.gate[i]) * (token @ experts.up[i])
        return inner @ experts.down[i]

    expected = torch.zeros_like(x)
    for sample in range(2):
        for at in range(16):
            for share, i in zip(scores[sample, at].softmax(-1), chosen[sample, at], strict=True):
                expected[sample, at] += share * feed_forward(x[sample, at], int(i))
    torch.testing.assert_close(experts(x), expected)
    # Without places for all: of each group's first expert that is full, tokens go without it.
    few = mixtral.Experts(dataclasses.replace(config, capacity_factor=0.5))
    few.load_state_dict(experts.state_dict())
    places, _ = few.route(x.reshape(-1, 8, 16))
    assert places.sum((1, 2)).max() == 1 * few.config.experts  # one place each, of all tokens
