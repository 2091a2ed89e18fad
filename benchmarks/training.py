"""A training step with AdamW of seven networks at the sizes of models.py, on the CPU or a GPU.

``--device cuda`` runs lazyxla on the CUDA plugin and the peers on the GPU by PyTorch's own kernels;
``--autocast`` computes in bfloat16 as torch.autocast has it.
"""

from __future__ import annotations

import os
from pathlib import Path

from common import Turns, arguments, parser, report, since_start, step_times

# As models.py calls them, which may not be imported before `arguments`.
MODELS = ("decoder", "gpt2", "bert", "vit", "resnet18", "resnet50", "mobilenet_v2")

parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
parser.add_argument("--batch", type=int, help="default: the network's own")
parser.add_argument("--autocast", action="store_true")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--turns", type=Path, help="file; see common.Turns")
args = arguments("lazyxla", "compiled", "eager", "inductor", models=MODELS)
os.environ["LAZYXLA_PLATFORM"] = args.device
turns = Turns(args.turns)

import torch  # noqa: E402

from benchmarks import models  # noqa: E402

ours = args.side in ("lazyxla", "compiled")
if ours:
    import lazyxla
    from lazyxla.dynamo import backend
device = torch.device("lazyxla" if ours else args.device)


def sync() -> None:
    if ours:
        lazyxla.sync()


def wait() -> None:
    if ours:
        lazyxla.sync(wait=True)
    elif device.type == "cuda":
        torch.cuda.synchronize()


torch.manual_seed(0)
training = models.MODELS[args.model]
model = training.make().to(device)
batch = tuple(tensor.to(device) for tensor in training.batch("cpu", args.batch))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
forward = model
if args.side == "inductor":
    forward = torch.compile(model)
elif args.side == "compiled":
    forward = torch.compile(model, backend=backend)


def step() -> torch.Tensor:
    with torch.autocast(device.type, torch.bfloat16, enabled=args.autocast):
        loss = training.loss(forward, *batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    sync()
    return loss


first = step()
wait()
figures = {"first_step_s": since_start(), "loss": first.item()}
for _ in range(2):
    step()
wait()
turns.begin()
figures |= step_times(step, wait, blocks=3, steps=args.steps)
turns.end()
if ours:
    figures |= {name: lazyxla.counters()[name] for name in ("compiles", "fallbacks")}
report(**figures)
