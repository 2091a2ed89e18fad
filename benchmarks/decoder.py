"""One training step of a small decoder with Adam, in PyTorch on lazyxla, the CPU or torch_xla.

The sides "captured" and "compiled" are lazyxla by ``lazyxla.compile(step, capture=True)`` and
``torch.compile(model)``. ``--device cuda`` runs lazyxla on the CUDA plugin, and PyTorch by its own
kernels for GPUs.

With ``--mesh data=4,model=2`` it is spread over so many of the CPU plugin's devices (lazyxla only):
layers over "model", and everything over "data".

Prints the steady step time, and where the time until the first step is done goes.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Turns, arguments, mesh_of, parser, report, since_start, step_times

parser.add_argument("--mesh", type=mesh_of)
parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
parser.add_argument("--turns", type=Path, help="file; see common.Turns")
args = arguments("lazyxla", "captured", "compiled", "eager", "inductor", "torch_xla")
if args.mesh and args.side != "lazyxla":
    parser.error("--mesh is for the side lazyxla")
ours = args.side in ("lazyxla", "captured", "compiled")
if args.device == "cuda":
    os.environ["LAZYXLA_PLATFORM"] = "cuda"
turns = Turns(args.turns)

import decoder_data as data  # noqa: E402
import torch  # noqa: E402

figures: dict[str, float] = {"import_torch_s": since_start()}


def timed(function: Callable[..., Any], total: list[float]) -> Callable[..., Any]:
    """``function``, adding the seconds that its calls take to ``total[0]``."""

    def call(*arguments: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            total[0] += time.perf_counter() - begin

    return call


lowering_time = [0.0]
if ours:
    import lazyxla
    from lazyxla import _C, lowering, reporting

    mesh = lazyxla.Mesh(tuple(args.mesh.values()), tuple(args.mesh)) if args.mesh else None
    _C.install_lowering(
        timed(reporting.lower, lowering_time), lowering.how, lowering.check_lowering
    )
    device, sync, wait = "lazyxla", lazyxla.sync, lambda: lazyxla.sync(wait=True)
elif args.side == "torch_xla":
    import torch_xla

    device, sync, wait = torch_xla.device(), torch_xla.sync, lambda: torch_xla.sync(wait=True)
else:
    device, sync = args.device, lambda: None
    wait = torch.cuda.synchronize if device == "cuda" else sync

from decoder_model import SMALL, Decoder, next_token_loss  # noqa: E402

figures["import_s"] = since_start()
model = Decoder(SMALL)
model.load_state_dict({name: torch.from_numpy(array) for name, array in data.weights().items()})
if args.mesh:
    from train_tensor_parallel import TENSOR_PARALLEL

    lazyxla.parallelize(model, mesh, TENSOR_PARALLEL)
    lazyxla.fully_shard(model, mesh, "data")
model.to(device)
wait()
figures["model_s"] = since_start() - figures["import_s"]
# What each device is fastest with: one kernel for all of Adam on the CPU, PyTorch's default else.
fused = True if device in ("cpu", "cuda") else None
optimizer = torch.optim.Adam(model.parameters(), lr=data.LEARNING_RATE, fused=fused)
figures["optimizer_s"] = since_start() - figures["import_s"] - figures["model_s"]

pairs = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in data.batches()]
stream = itertools.cycle(pairs)
recordings: list[float] = []


def upload(tensor: torch.Tensor) -> torch.Tensor:
    return lazyxla.shard(tensor, mesh, ("data",)) if args.mesh else tensor.to(device)


forward = model
if args.side == "compiled":
    forward = torch.compile(model, backend="lazyxla")
elif args.side == "inductor":
    forward = torch.compile(model)


def train(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = next_token_loss(forward(tokens), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


if args.side == "captured":
    train = lazyxla.compile(train, capture=True)


def step() -> torch.Tensor:
    begin = time.perf_counter()
    tokens, targets = (upload(tensor) for tensor in next(stream))
    loss = train(tokens, targets)
    recordings.append(time.perf_counter() - begin)
    sync()
    return loss


for number in range(data.WARM_UP):
    begin = time.perf_counter()
    loss = step()
    wait()
    if number == 0:
        figures["first_step_s"] = since_start()
        figures["record_s"] = recordings[0]
        figures["lowering_s"] = lowering_time[0]
        figures["compile_s"] = time.perf_counter() - begin - recordings[0] - lowering_time[0]
figures["warm_up_s"] = since_start()

last: list[torch.Tensor] = []


def measured_step() -> None:
    last[:] = [step()]


turns.begin()
figures |= step_times(measured_step, wait, blocks=data.BLOCKS, steps=data.STEPS)
turns.end()
figures["hot_record_ms"] = min(recordings) * 1e3
if args.side not in ("eager", "inductor"):
    # What is called compiling so far holds one execution as well.
    figures["compile_s"] -= figures["step_ms"] / 1e3 - min(recordings)
if ours:
    figures |= {name: lazyxla.counters()[name] for name in ("compiles", "fallbacks")}
report(**figures, loss=last[0].item())
