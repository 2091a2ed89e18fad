"""lazyxla.aot.compile and capture: programs are recorded without being run, and compiled."""

from __future__ import annotations

import re
import resource
from typing import Any

import pytest
import torch
from torch import nn

import lazyxla
from examples.decoder_model import SMALL, Decoder, next_token_loss
from lazyxla import aot
from lazyxla.dynamo import backend
from tests.aot.training import adamw_step, train_step
from tests.conftest import ROOT, RunPython
from tests.support import needs_libtpu

pytestmark = [needs_libtpu, pytest.mark.usefixtures("nothing_happens")]

V5E = "v5e:2x2"
MiB = 2**20


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))


def _batch(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.zeros(128, dtype=torch.int64, device=device)
    return torch.zeros(128, 256, device=device), labels


def test_a_function() -> None:
    pair = torch.ones(256, 512), torch.ones(512, 128)
    compiled = aot.compile(torch.matmul, pair, topology=V5E)
    memory = compiled.memory_stats()
    assert memory["arguments"] == sum(x.nbytes for x in pair)
    assert memory["outputs"] == 256 * 128 * 4
    assert compiled.flops == 2 * 256 * 512 * 128
    assert compiled.fits is True
    assert compiled.num_parameters is None


def test_keyword_arguments_and_nested_inputs() -> None:
    def fn(pair: list[torch.Tensor], *, more: dict[str, torch.Tensor], factor: int) -> Any:
        return {"sum": (pair[0] + pair[1] + more["x"]) * factor}

    x = torch.ones(1024)
    compiled = aot.compile(fn, ([x, x],), {"more": {"x": x}, "factor": 3}, topology=V5E)
    assert compiled.num_outputs == 1
    assert compiled.memory_stats()["arguments"] == 3 * x.nbytes


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_a_module_that_keeps_a_result() -> None:
    model = nn.utils.weight_norm(nn.Linear(256, 512))  # its weight, made anew before each call
    before = model.weight
    compiled = aot.compile(model, _batch()[:1], topology=V5E)
    assert compiled.num_parameters == 256 * 512 + 512 + 512
    assert model.weight is before


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_is_not_changed(device: str) -> None:
    model = _mlp().to(device)
    model.register_buffer("shift", torch.ones(10, device=device))
    before = {name: (value, value.data_ptr()) for name, value in model.state_dict().items()}
    compiled = aot.compile(model, _batch(device)[:1], topology=aot.topology(V5E))
    assert compiled.num_parameters == sum(p.numel() for p in model.parameters())
    assert compiled.memory_stats()["arguments"] >= 4 * compiled.num_parameters
    for name, value in model.state_dict().items():
        assert value.device.type == device
        assert value.data_ptr() == before[name][1]
    assert all(p.grad is None for p in model.parameters())


def test_what_autograd_keeps_is_no_output() -> None:
    model = _mlp()
    compiled = aot.compile(model, _batch()[:1], topology=V5E)
    assert compiled.num_outputs == 1
    with torch.no_grad():
        same = aot.compile(model, _batch()[:1], topology=V5E)
    assert same.memory_stats() == compiled.memory_stats()


def test_a_training_step() -> None:
    model = _mlp()
    compiled = aot.compile(model, _batch(), topology=V5E, train_step=adamw_step)
    parameters = list(model.parameters())
    state = 3 * len(parameters)  # parameters, and two moments of each
    assert compiled.num_outputs == state + 1  # the loss
    memory = compiled.memory_stats()
    # All of the state is updated in its place.
    assert memory["aliased"] >= 3 * 4 * compiled.num_parameters
    assert memory["outputs"] - memory["aliased"] < 64 * 1024
    assert compiled.flops > 2 * (2 * 128 * 256 * 512)  # forward, and the first gradient
    assert all(p.grad is None for p in parameters)


def test_ties_are_kept() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(1000, 64)
            self.head = nn.Linear(64, 1000, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(x))

    tokens = torch.zeros(8, dtype=torch.int64)
    compiled = aot.compile(Tied(), (tokens,), topology=V5E)
    assert compiled.num_parameters == 64_000
    assert compiled.memory_stats()["arguments"] < 2 * 4 * 64_000


def test_a_model_larger_than_the_machine() -> None:
    """Twelve billion parameters, 48 GB, which neither machine nor TPU has."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(16384, 16384, bias=False) for _ in range(45)))
        x = torch.empty(8, 16384)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(torch.OutOfMemoryError, match=r"does not fit in .* one TPU v5 lite: .*RESO"):
        aot.compile(model, (x,), topology=V5E)
    with aot.capture("v5p:2x2x1") as programs:
        with torch.device("lazyxla"):
            large = nn.Sequential(*(nn.Linear(16384, 16384) for _ in range(45)))
        lazyxla.sync()
        with torch.no_grad():
            kept = large(torch.ones(8, 16384, device="lazyxla"))
    assert kept.shape == (8, 16384)
    assert [len(p.program.outputs) for p in programs] == [90, 1]
    compiled = programs[1].compile()
    assert compiled.fits
    assert compiled.memory_stats()["arguments"] > 45 * 16384**2 * 4
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    assert grown < 2 * 1024**2  # the compiler's own
    assert all(p.is_meta for p in model.parameters())


def test_equal_programs_are_one() -> None:
    """A learning rate that changes is an input from the start."""
    with aot.capture(V5E) as programs:
        model = nn.Linear(16, 16).to("lazyxla")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for number in range(5):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
            model(torch.ones(4, 16).to("lazyxla")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            lazyxla.sync()
    *momenta, step = programs
    assert [program.times for program in momenta] == [1, 1]  # zeros in two shapes
    assert step.times == 5
    steady = step.program
    assert any(slot.variable for slot in steady.slots)
    assert len(steady.donations) == 4  # weight, bias and their momenta
    assert repr(step).startswith(f"CapturedProgram({len(steady.nodes)} operators, ")


def test_captured_programs_are_those_that_run(run_python: RunPython) -> None:
    """What a real run lowers, operators, numbers and donations, is what a capture hands over."""
    code = """
import lazyxla, torch
from torch import nn
from lazyxla import lowering, reporting
from lazyxla.aot import capture

lowered = []
original = lowering.lower
def lower(program, platform, *rest):
    lowered.append(program)
    return original(program, platform, *rest)
reporting.lowering.lower = lower

def train():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 2)).to("lazyxla")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(6):
        model(torch.ones(4, 8).to("lazyxla")).sum().backward()
        optimizer.step(); schedule.step(); optimizer.zero_grad()
        lazyxla.sync()

with capture("v5e:2x2") as programs:
    train()
assert not lowered
state = lazyxla.random.get_rng_state()
train()
def known(program):  # the seed and ordinal of random operators apart
    slots = [s._replace(value=0) if s.variable else s for s in program.slots]
    return program._replace(slots=slots)
assert [known(p.program) for p in programs] == [known(p) for p in lowered], (programs, lowered)
print(len(programs))
"""
    # The step, and what makes the optimizer's state of four shapes.
    assert run_python(code).stdout.strip() == "5"


def test_the_tpus_rules_are_used() -> None:
    """An operator that calls the host on the CPU, and has a rule for other platforms."""
    x = torch.eye(64)
    compiled = aot.compile(torch.linalg.qr, (x,), topology=V5E)
    assert compiled.num_outputs == 2
    with pytest.raises(RuntimeError, match=r"linalg_eig.* has no lowering and would run on the ho"):
        aot.compile(torch.linalg.eig, (x,), topology=V5E)


def test_torch_compile_within() -> None:
    compiled = torch.compile(lambda x: torch.relu(x) * 2, backend=backend)
    assert aot.compile(compiled, (torch.ones(8),), topology=V5E).num_outputs == 1


def test_compile_options_are_the_topologys() -> None:
    def compiled(option: str) -> Any:
        fn = torch.compile(torch.relu, backend=backend, options={option: True})
        return aot.compile(fn, (torch.ones(8),), topology=V5E)

    assert compiled("xla_tpu_enable_latency_hiding_scheduler").num_outputs == 1
    with pytest.raises(RuntimeError, match="xla_no_such_option"):
        compiled("xla_no_such_option")


@pytest.mark.parametrize("topology", [None, V5E])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"xla_nor_this": True}, ValueError, r"options {'xla_nor_this': True}: .*'xla_nor_this'"),
        ([1], TypeError, r"the options of lazyxla.aot must be a dict .* not \[1\]"),
        ({"xla_x": None}, TypeError, "option xla_x must be a bool, int, float or str, not None"),
        ({"xla_x": 2**70}, ValueError, "option xla_x does not fit in 64 bits"),
    ],
)
def test_bad_options_are_named(
    topology: str | None, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        aot.compile(torch.relu, (torch.ones(8),), topology=topology, options=options)
    assert "LAZYXLA_XLA_OPTIONS" not in str(caught.value)


@pytest.mark.parametrize("topology", [None, V5E])
def test_bad_options_of_torch_compile_are_named(topology: str | None) -> None:
    fn = torch.compile(torch.relu, backend=backend, options={"xla_nor_this": True})
    with pytest.raises(RuntimeError, match=r"XLA does not take .*'xla_nor_this'") as caught:
        aot.compile(fn, (torch.ones(8),), topology=topology)
    assert "LAZYXLA_XLA_OPTIONS" not in str(caught.value)


def test_the_decoder_trains() -> None:
    with torch.device("meta"):
        model = Decoder(SMALL)
    tokens = torch.zeros(4, SMALL.max_length, dtype=torch.int64)
    step = train_step(lambda model, x, y: next_token_loss(model(x), y))
    compiled = aot.compile(model, (tokens, tokens), topology=V5E, train_step=step)
    assert compiled.fits
    assert compiled.memory_stats()["aliased"] >= 3 * 4 * compiled.num_parameters
    assert compiled.flops > 3 * 2 * tokens.numel() * model.head.weight.numel()


def test_what_runs_afterwards_is_not_confused(run_python: RunPython) -> None:
    """A factorization is XLA's own on a TPU, and PyTorch's kernel, called, on the CPU."""
    code = """
import lazyxla, torch
x = torch.eye(8)
def on_cpu():
    before = lazyxla.counters()["host_calls"]
    torch.linalg.qr(x.to("lazyxla"))[0].cpu()
    return lazyxla.counters()["host_calls"] - before
for _ in range(2):
    lazyxla.aot.compile(torch.linalg.qr, (x,), topology="v5e:2x2")
    assert on_cpu() == 1
"""
    run_python(code)


def test_the_documentation(run_python: RunPython) -> None:
    """The snippets of docs/aot.md run, here with smaller matrices."""
    text = (ROOT / "docs" / "aot.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    code = "\n".join(snippets).replace("32768", "512").replace("8192", "128")
    printed = run_python(code).stdout
    assert printed.count("Program for one device of Topology(") == 2
    for line in re.findall(r"^CapturedProgram.*$", text, re.MULTILINE):
        assert line in printed


def test_the_report() -> None:
    compiled = aot.compile(_mlp(), _batch()[:1], topology=V5E)
    lines = str(compiled).splitlines()
    assert lines[0] == "Program for one device of Topology('v5e:2x2', 4 x TPU v5 lite)"
    assert lines[1] == "  parameters                136,714"
    text = str(compiled)
    assert " of 15.75 GiB: fits" in text
    assert "of 197 TFLOP/s (bfloat16)" in text
    assert "of 819 GB/s" in text
    least = max(compiled.bytes_accessed / 819e9, compiled.flops / 197e12)
    assert compiled.least_seconds == pytest.approx(least)
    assert compiled.estimated_seconds == max(compiled.estimated_cycles / 1.5e9, least)
    assert 0 < compiled.share_of_peak_flops < 1
    assert compiled.optimized_hlo().startswith("HloModule main, is_scheduled=true")
    assert len(compiled.serialize()) > 1000


def test_several_programs() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        lazyxla.sync()
        return y * 2

    with pytest.raises(ValueError, match=r"breaks into 2 programs, since it calls lazyxla\.sync"):
        aot.compile(fn, (torch.ones(3),), topology=V5E)
