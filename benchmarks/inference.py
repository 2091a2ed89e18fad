"""torch.compile inference of ten models at batch 1: latency, first call, and what the host pays.

Every model runs in a process of its own, which this program starts: a first call pays for imports,
tracing and compiling.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from common import arguments, report

MODELS = (
    *("resnet18", "resnet50", "resnext50_32x4d", "alexnet", "mobilenet_v2"),
    *("mnasnet1_0", "vgg16", "squeezenet1_1", "bert4", "vit4"),
)
SECONDS = 4.0
"""How long the calls of a model are repeated."""

args = arguments("lazyxla", "eager", "inductor", "torch_xla", models=MODELS)

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


def nothing() -> None:
    pass


torch.manual_seed(0)
model, data = build(args.model)
model.eval()
wait: Callable[[], object] = nothing
begin = time.perf_counter()
if args.side == "lazyxla":
    import lazyxla
    from lazyxla import _C, dynamo
    from lazyxla.dynamo import execution

    import_s = time.perf_counter() - begin
    call_seconds: list[float] = []
    model, data = model.to("lazyxla"), data.to("lazyxla")
    wait = lambda: lazyxla.sync(wait=True)  # noqa: E731
    wait()
elif args.side == "torch_xla":
    import torch_xla
    from torch_xla.core.xla_model import wait_device_ops

    import_s = time.perf_counter() - begin
    model, data = model.to(torch_xla.device()), data.to(torch_xla.device())
    torch_xla.sync()
    wait = wait_device_ops
    wait()
else:
    import_s = 0.0


def compiled() -> Callable[..., object]:
    if args.side == "eager":
        return model
    if args.side == "inductor":
        return torch.compile(model)
    if args.side == "torch_xla":
        return torch.compile(model, backend="openxla")
    dynamo.compile_graph = compile_timed
    return torch.compile(model, backend=dynamo.backend)


def compile_timed(*arguments: object) -> Callable[..., object]:
    """lazyxla's compile_graph; what it returns notes the seconds that each call takes."""
    function = execution.compile_graph(*arguments)

    def run(values: list[object]) -> object:
        begin = time.perf_counter()
        result = function(values)
        call_seconds.append(time.perf_counter() - begin)
        return result

    return execution.boxed(run)


def measure(function: Callable[..., object]) -> dict[str, float]:
    """The best time of a call, until its result is there."""
    best, end = 1e9, time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        begin = time.perf_counter()
        result = function(data)
        wait()
        best = min(best, time.perf_counter() - begin)
        del result
    return {"latency_ms": best * 1e3}


def overhead(function: Callable[..., object]) -> dict[str, float]:
    """The best times of lazyxla's part of a call, and of a sync without the plugin's part."""
    calls, flushes = [], []
    _C.measure_executions(True)
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        result = function(data)
        calls.append(call_seconds[-1])
        plugin = _C.seconds_in_executions()
        begin = time.perf_counter()
        lazyxla.sync()
        whole = time.perf_counter() - begin
        flushes.append(whole - (_C.seconds_in_executions() - plugin))
        wait()
        del result
    _C.measure_executions(False)
    call_us, flush_us = min(calls) * 1e6, min(flushes) * 1e6
    return {"call_us": call_us, "flush_us": flush_us, "overhead_us": call_us + flush_us}


with torch.no_grad():
    begin = time.perf_counter()
    function = compiled()
    kept = function(data)
    wait()
    first_call_s = time.perf_counter() - begin
    figures = {"first_call_s": first_call_s, "import_and_first_call_s": import_s + first_call_s}
    del kept
    for _ in range(3):
        function(data)
        wait()
    figures |= measure(function)
    figures["tensors"] = len(list(model.parameters())) + len(list(model.buffers()))
    if args.side == "lazyxla":
        figures |= overhead(function)
report(**figures)
