"""Loops as people write them, with the libraries that they use: they stop compiling.

A program of the model is one of at least so many operators; small programs, such as that of a
tensor that grows, are new at every turn by their nature.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lazyxla
from tests import vision  # noqa: F401 - transformers wants a torchvision that can be imported
from tests.support import DEVICE, counted, programs

TOKENS = 64
SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 128, (1, length), generator=generator)


def language_model(name: str, **options: Any) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **options})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None  # every prompt gets all of its tokens
    return model


def generate(model: torch.nn.Module, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    options = {"max_new_tokens": TOKENS, "do_sample": False, **options}
    return model.generate(ids.to(next(model.parameters()).device), **options).cpu()


@pytest.mark.parametrize("sample", [False, True])
def test_generating_with_a_static_cache(sample: bool) -> None:
    model = language_model("Llama")
    want = generate(model, prompt(12), cache_implementation="static")
    model.to(DEVICE)
    options = {"cache_implementation": "static", "do_sample": sample}
    with programs() as found:
        ours = generate(model, prompt(12), **options)
    assert ours.shape == want.shape
    if not sample:
        assert torch.equal(ours, want)
    # Of the prompt; of a token; and that without what grows.
    assert len(found.large(60)) <= 3, found.sizes
    with counted() as n:
        generate(model, prompt(12, seed=1), **options)
    assert n.compiles == 0
    with programs() as found:
        generate(model, prompt(9), **options)  # fits into the cache that is there
    assert len(found.large(60)) <= 1, found.sizes


def test_generating_with_a_cache_that_grows(caplog: pytest.LogCaptureFixture) -> None:
    model = language_model("Llama", hidden_size=48).to(DEVICE)
    lazyxla.recompilations._causes.clear()
    generate(model, prompt(12), max_new_tokens=8)
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(told) == 1
    assert 'cache_implementation="static"' in told[0]


EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 8,
    },
    "DeepseekV3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "v_head_dim": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "GptOss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


@pytest.mark.parametrize("implementation", [None, "batched_mm"])
@pytest.mark.parametrize("name", EXPERTS)
def test_mixtures_of_experts(name: str, implementation: str | None) -> None:
    model = language_model(name, **EXPERTS[name]).train()
    if implementation:
        model.set_experts_implementation(implementation)
    ours = copy.deepcopy(model).to(DEVICE)
    losses = {}
    with programs() as found:
        for device, each in (("cpu", model), (DEVICE, ours)):
            optimizer = torch.optim.Adam(each.parameters(), 1e-3)
            ids = prompt(16).to(device)
            losses[device] = []
            for _ in range(4):
                optimizer.zero_grad()
                loss = each(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                losses[device].append(loss.item())
    torch.testing.assert_close(losses[DEVICE], losses["cpu"])
    # The loss is read in mid-step, before the optimizer's part.
    assert len(found.large(60)) <= 2, found.sizes
    ours.eval()
    with programs() as found:
        generate(ours, prompt(8), max_new_tokens=12, cache_implementation="static")
    assert len(found.large(60)) <= 3, found.sizes
    with counted() as n:
        generate(ours, prompt(8), max_new_tokens=12, cache_implementation="static")
    assert n.compiles == 0


def test_experts_that_are_chosen_on_the_host(caplog: pytest.LogCaptureFixture) -> None:
    model = language_model("Mixtral", **EXPERTS["Mixtral"]).to(DEVICE)
    model.set_experts_implementation("eager")
    lazyxla.recompilations._causes.clear()
    with torch.no_grad():
        for seed in range(8):
            model(input_ids=prompt(16, seed).to(DEVICE)).logits.sum().item()
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any("modeling_mixtral.py" in text and "changed in dimension" in text for text in told)


def unet() -> torch.nn.Module:
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    ).eval()


def denoise(
    model: torch.nn.Module, scheduler: Any, steps: int, sync: bool, images: int
) -> torch.Tensor:
    device = next(model.parameters()).device
    scheduler.set_timesteps(steps, device=device)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(images, 3, 16, 16, generator=generator).to(device) * scheduler.init_noise_sigma
    with torch.no_grad():
        for t in scheduler.timesteps:
            noise = model(scheduler.scale_model_input(x, t), t).sample
            x = scheduler.step(noise, t, x).prev_sample
            if sync:
                lazyxla.sync()
    return x.cpu()


SCHEDULERS = ("DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler")


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_diffusion(name: str, sync: bool) -> None:
    import diffusers

    # Which numbers are presumed to vary depends on the calls of the same sizes before.
    images = 1 + 2 * SCHEDULERS.index(name) + sync

    def run(steps: int, sync: bool = sync) -> torch.Tensor:
        return denoise(model, getattr(diffusers, name)(), steps, sync, images)

    model = unet()
    few = run(3, sync=False)
    model.to(DEVICE)
    with programs() as found:
        run(50)
    assert len(found.large(120)) <= 3, found.sizes
    with counted() as n:
        run(50)
    assert n.compiles == 0
    # After more steps a model with random weights has made its rounding errors the result. Noise of
    # up to 600 is what small values are left of: they are as exact as the greatest.
    torch.testing.assert_close(run(3) / few.abs().max(), few / few.abs().max())


def test_minibatches_of_a_tensor() -> None:
    x, y = torch.randn(96, 8), torch.randn(96, 1)
    results = {}
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        model.to(device)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        xs, ys = x.to(device), y.to(device)
        with programs() as found:
            for _ in range(2):
                for i in range(0, 96, 8):
                    optimizer.zero_grad()
                    loss = F.mse_loss(model(xs[i : i + 8]), ys[i : i + 8])
                    loss.backward()
                    optimizer.step()
                    if device == DEVICE:
                        lazyxla.sync()
        results[device] = [p.detach().cpu() for p in model.parameters()]
    assert len(found.large(8)) <= 3, found.sizes
    for ours, theirs in zip(results[DEVICE], results["cpu"], strict=True):
        torch.testing.assert_close(ours, theirs)


class Trainer:
    """A loop with all that is done around steps now and then."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(16, 4),
        ).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / 20)
        )
        self.average = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
        )
        self.losses: list[float] = []

    def step(self, number: int) -> None:
        x = torch.randn(16, 8).to(DEVICE)
        y = torch.randint(0, 4, (16,)).to(DEVICE)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.average.update_parameters(self.model)
        lazyxla.sync()
        if number % 10 == 0:
            self.losses.append(loss.item())
        if number % 25 == 0:
            self.validate()
        if number % 30 == 0:
            torch.save(self.model.state_dict(), self.folder / "model.pt")

    def validate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            right = sum(
                (self.model(torch.randn(16, 8).to(DEVICE)).argmax(1) == 1).sum() for _ in range(3)
            )
        self.losses.append(float(right))
        self.model.train()


def test_what_is_done_now_and_then(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    for number in range(61):  # each kind of step at least twice
        trainer.step(number)
    with counted() as n:
        for number in range(61, 151):
            trainer.step(number)
    assert n.compiles == 0
    assert len(trainer.losses) > 15


def test_a_replay_buffer() -> None:
    """Written at an index of the host's, sampled on the device."""
    torch.manual_seed(0)
    states = torch.zeros(64, 4, device=DEVICE)
    returns = torch.zeros(64, device=DEVICE)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model.to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    lazyxla.sync()

    def step(i: int) -> torch.Tensor:
        states[i % 64] = torch.full((4,), i / 10).to(DEVICE)
        returns[i % 64] = float(i)
        rows = torch.randint(0, 64, (16,), device=DEVICE)
        optimizer.zero_grad()
        loss = F.mse_loss(model(states[rows]).squeeze(1), returns[rows])
        loss.backward()
        optimizer.step()
        lazyxla.sync()
        return loss.detach()

    with counted() as n:
        for i in range(6):
            step(i)
    first = n.compiles
    with counted() as n:
        for i in range(6, 140):
            step(i)
    assert n.compiles == 0
    assert first <= 12  # the optimizer's state is made by small programs of their own
    assert torch.equal(returns.cpu()[:12], torch.arange(128, 140).float())


def test_eager_tokens_of_a_cache_that_grows() -> None:
    cache = torch.zeros(1, 0, 8, device=DEVICE)
    token = torch.ones(1, 1, 8, device=DEVICE)
    weight = torch.eye(8, device=DEVICE)

    def run() -> torch.Tensor:
        grown = cache
        for _ in range(100):
            grown = torch.cat([grown, token @ weight], 1)
            torch.softmax(token @ grown.mT, -1) @ grown
        return grown

    with lazyxla.eager_mode(True):
        with programs() as found:
            first = run()
            lazyxla.sync(wait=True)
        with counted() as n:
            again = run()
            lazyxla.sync(wait=True)
    assert n.compiles == 0
    assert len(found.sizes) <= 4 * 100 + 2  # an operator's program for each length
    assert torch.equal(first.cpu(), again.cpu())
    assert first.shape == (1, 100, 8)
