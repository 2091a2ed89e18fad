"""torch.compile inference of ten models at batch 1: latency, first call, and what the host pays.

Every model runs in a process of its own, which this program starts: a first call pays for imports,
tracing and compiling.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable

from common import arguments, report

MODELS = (
    *("resnet18", "resnet50", "resnext50_32x4d", "alexnet", "mobilenet_v2"),
    *("mnasnet1_0", "vgg16", "squeezenet1_1", "bert4", "vit4"),
)
SECONDS = 4.0
"""How long the calls of a model are repeated."""

args = arguments("lazyxla", "eager", "inductor", models=MODELS)

if not args.model:
    figures: dict[str, float] = {}
    for name in MODELS:
        command = [sys.executable, *sys.argv, "--model", name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name}: {done.stderr.strip().splitlines()[-1]}")
        child = json.loads(done.stdout.splitlines()[-1])
        figures |= {f"{name}.{key}": value for key, value in child.items()}
    report(**figures)
    sys.exit()

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torchvision_import import import_torchvision  # noqa: E402


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A model with random weights, and its input."""
    vision = import_torchvision()
    if vision is None:
        raise SystemExit("torchvision is not installed")
    if name == "bert4":
        from transformers import BertConfig, BertModel

        return BertModel(BertConfig(num_hidden_layers=4)), torch.randint(30522, (1, 128))
    images = torch.randn(1, 3, 224, 224)
    if name == "vit4":
        return vision.models.VisionTransformer(224, 16, 4, 12, 768, 3072), images
    return getattr(vision.models, name)(), images


Result = Callable[[], object]


def nothing() -> None:
    pass


torch.manual_seed(0)
model, data = build(args.model)
model.eval()
sync: Result = nothing
wait: Result = nothing
if args.side == "lazyxla":
    import lazyxla
    from lazyxla import _C

    model, data = model.to("lazyxla"), data.to("lazyxla")
    sync, wait = lazyxla.sync, lambda: lazyxla.sync(wait=True)
    wait()


def compiled() -> Callable[..., object]:
    if args.side == "eager":
        return model
    if args.side == "inductor":
        return torch.compile(model)
    from lazyxla.dynamo import backend

    return torch.compile(model, backend=backend)


def measure(function: Callable[..., object]) -> dict[str, float]:
    """The best times of a call: until the result is there, of the call alone, of its sync alone."""
    best = {"latency_ms": 1e9, "call_us": 1e9, "enqueue_us": 1e9}
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        begin = time.perf_counter()
        result = function(data)
        called = time.perf_counter()
        sync()
        enqueued = time.perf_counter()
        wait()
        done = time.perf_counter()
        best["latency_ms"] = min(best["latency_ms"], (done - begin) * 1e3)
        best["call_us"] = min(best["call_us"], (called - begin) * 1e6)
        best["enqueue_us"] = min(best["enqueue_us"], (enqueued - called) * 1e6)
        del result
    return best


def idle(module: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
    """A backend that runs a graph once and returns the same results ever after."""
    kept: list[object] = []

    def run(*values: torch.Tensor) -> object:
        if not kept:
            kept.append(module(*values))
        return kept[0]

    return run


def host_parts(function: Callable[..., object]) -> dict[str, float]:
    """Which part of a call and its sync is the plugin's, and which is Dynamo's guards and code."""
    plugin, dynamo = [], []
    _C.measure_executions(True)
    for _ in range(50):
        result = function(data)
        before = _C.seconds_in_executions()
        sync()
        plugin.append((_C.seconds_in_executions() - before) * 1e6)
        wait()
        del result
    _C.measure_executions(False)
    torch._dynamo.reset()
    nothing_compiled = torch.compile(model, backend=idle)
    for _ in range(50):
        begin = time.perf_counter()
        nothing_compiled(data)
        dynamo.append((time.perf_counter() - begin) * 1e6)
        model(data)  # what a call does to the processor's caches
        wait()
    return {"plugin_us": min(plugin), "dynamo_us": min(dynamo)}


with torch.no_grad():
    begin = time.perf_counter()
    function = compiled()
    kept = function(data)
    wait()
    figures = {"first_call_s": time.perf_counter() - begin}
    del kept
    for _ in range(3):
        function(data)
        wait()
    figures |= measure(function)
    figures["tensors"] = len(list(model.parameters())) + len(list(model.buffers()))
    if args.side == "lazyxla":
        figures |= host_parts(function)
        total = figures["call_us"] + figures["enqueue_us"]
        figures["overhead_us"] = total - figures["plugin_us"] - figures["dynamo_us"]
report(**figures)
