"""lazyxla.aot: topologies by name, what they tell, and what their compiler does."""

from __future__ import annotations

import pytest
import torch

import lazyxla
from lazyxla import platforms
from tests.lowering.harness import record
from tests.support import needs_cuda, needs_libtpu


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "kind", "devices", "hosts"),
    [
        ("v4:2x2x1", "TPU v4", 8, 1),
        ("v5e:2x2", "TPU v5 lite", 4, 1),
        ("v5p:2x2x1", "TPU v5", 4, 1),
        ("v6e:4x4", "TPU v6 lite", 16, 4),
        ("tpu7x:2x2x1", "TPU7x", 8, 1),
    ],
)
def test_topologies(name: str, kind: str, devices: int, hosts: int) -> None:
    topology = lazyxla.aot.topology(name)
    assert (topology.name, topology.platform, topology.device_kind) == (name, "tpu", kind)
    assert (topology.num_devices, topology.num_hosts) == (devices, hosts)
    assert topology.memory_bytes > 2**30
    assert repr(topology) == f"Topology({name!r}, {devices} x {kind})"


@needs_cuda
@pytest.mark.parametrize(
    ("name", "kind", "gib"),
    [
        ("l4", "NVIDIA L4", 22),
        ("a100", "NVIDIA A100-SXM4-80GB", 79),
        ("h100", "NVIDIA H100 80GB HBM3", 79),
        ("h200", "NVIDIA H200", 141),
        ("b200", "NVIDIA B200", 178),
    ],
)
def test_gpus(name: str, kind: str, gib: int) -> None:
    topology = lazyxla.aot.topology(name)
    assert (topology.name, topology.platform, topology.device_kind) == (name, "cuda", kind)
    assert (topology.num_devices, topology.num_hosts) == (1, 1)
    assert topology.memory_bytes >> 30 == gib
    compiled = topology.compile(record("aten::mm", torch.ones(64, 32), torch.ones(32, 16)).program)
    memory = compiled.memory_stats()
    assert (memory["arguments"], memory["outputs"]) == ((64 * 32 + 32 * 16) * 4, 64 * 16 * 4)
    assert compiled.fits
    assert len(compiled.serialize()) > 1000
    assert "dot" in compiled.optimized_hlo()


@needs_libtpu
@pytest.mark.parametrize("name", ["bogus", "", "v9:2x2", "v5litepod-4", "v5e:0x2", "v5e:3x5"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(ValueError, match=r"no TPUs: .*v5e, v5p, v6e.*v5p:2x2x1.*a100, h100"):
        lazyxla.aot.topology(name)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "plugin_of", lambda name: None)
    with pytest.raises(ImportError, match=r"libtpu.* not installed: pip install 'lazyxla\[tpu\]"):
        lazyxla.aot.topology("v5e:2x2")
    with pytest.raises(ImportError, match=r"CUDA.* not installed: pip install 'lazyxla\[cuda\]"):
        lazyxla.aot.topology("h100")


@needs_libtpu
def test_what_the_compiler_tells() -> None:
    program = record("aten::mm", torch.ones(256, 512), torch.ones(512, 128)).program
    compiled = lazyxla.aot.topology("v5e:2x2").compile(program)
    assert compiled.num_outputs == 1
    memory = compiled.memory_stats()
    assert memory["arguments"] == (256 * 512 + 512 * 128) * 4
    assert memory["outputs"] == 256 * 128 * 4
    assert memory["peak"] >= memory["arguments"] + memory["outputs"]
    assert compiled.cost_analysis()["flops"] == 2 * 256 * 512 * 128
    assert memory["generated_code"] > 0
    assert len(compiled.serialize()) > 1000  # in some versions compressed


@needs_libtpu
def test_refusals() -> None:
    topology = lazyxla.aot.topology("v5e:2x2")
    program = record("aten::exp", torch.ones(3)).program
    topology.compile(program, {"xla_tpu_enable_latency_hiding_scheduler": True})
    with pytest.raises(ValueError, match="xla_no_such_option"):
        topology.compile(program, {"xla_no_such_option": True})
    with pytest.raises(RuntimeError, match="Failed to parse using StableHLO"):
        topology.compile(b"no program")


@needs_libtpu
def test_more_memory_than_a_device_has() -> None:
    program = record("aten::exp", torch.ones(1)).program
    spec = program.inputs[0]._replace(shape=(1 << 33,))  # 32 GiB; a v5e has 16
    node = program.nodes[0]._replace(outputs=(spec,))
    program = program._replace(inputs=[spec], nodes=[node])
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        lazyxla.aot.topology("v5e:2x2").compile(program)


@pytest.mark.parametrize(
    "name", [pytest.param("v5e:2x2", marks=needs_libtpu), pytest.param("h100", marks=needs_cuda)]
)
def test_the_device_stays_as_it_is(name: str, run_python) -> None:
    code = f"""
import lazyxla, torch
topology = lazyxla.aot.topology("{name}")
assert not lazyxla._C.initialized()
assert (torch.ones(3, device="lazyxla") + 1).tolist() == [2, 2, 2]
assert lazyxla.platform() == "cpu"
print(topology)
"""
    result = run_python(code)
    assert result.stdout.startswith(f"Topology('{name}', ")
    assert result.stderr == ""
