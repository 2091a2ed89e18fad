"""Loops of libraries: 64 tokens of transformers' generate(), 50 steps of a diffusers sampler.

The first loop of a process compiles; the best of the following ones does not. They are many, for
the same loop may take twice as long a few seconds later.
"""

from __future__ import annotations

import time

from common import arguments, report

MODELS = ("generate", "diffusion")
args = arguments("lazyxla", "eager", models=MODELS)

import torch  # noqa: E402
from torchvision_import import import_torchvision  # noqa: E402

import_torchvision()  # transformers imports it if it is installed
if args.side == "lazyxla":
    import lazyxla

    device, counters = "lazyxla", lazyxla.counters
else:
    device, counters = "cpu", dict

LOOPS, TOKENS, STEPS = 80, 64, 50


def generate() -> torch.Tensor:
    return model.generate(
        torch.arange(1, 17).reshape(1, 16).to(device),
        attention_mask=torch.ones(1, 16, dtype=torch.long, device=device),
        max_new_tokens=TOKENS,
        do_sample=False,
        cache_implementation="static",
    )


def diffusion() -> torch.Tensor:
    scheduler = EulerDiscreteScheduler()
    scheduler.set_timesteps(STEPS, device=device)
    torch.manual_seed(0)
    x = torch.randn(1, 3, 16, 16).to(device) * scheduler.init_noise_sigma
    with torch.no_grad():
        for t in scheduler.timesteps:
            noise = model(scheduler.scale_model_input(x, t), t).sample
            x = scheduler.step(noise, t, x).prev_sample
    return x


torch.manual_seed(0)
if args.model == "generate":
    from generate import make_model

    model, loop = make_model(device), generate
else:
    from diffusers import EulerDiscreteScheduler, UNet2DModel

    loop = diffusion
    model = UNet2DModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(32, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    ).eval()
    model.to(device)

times = []
for _ in range(LOOPS):
    begin = time.perf_counter()
    loop().cpu()
    times.append(time.perf_counter() - begin)
report(first_loop_s=times[0], loop_s=min(times[1:]), compiles=float(counters().get("compiles", 0)))
