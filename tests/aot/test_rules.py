"""Lowered programs are taken by the compilers for TPUs and GPUs: a short form of sweep.py, for
every run.

Nothing is executed. All rules that are for one platform only are among them.
"""

from __future__ import annotations

import pytest
import torch

import lazyxla
from lazyxla.lowering import registry
from lazyxla.lowering.tpu.builder import TpuBuilder
from tests.aot.calls import find, made_by_hand
from tests.aot.compiling import refusal
from tests.aot.expected import REFUSED
from tests.calls import Call
from tests.lowering.harness import record
from tests.opinfo.entries import entries
from tests.support import needs_cuda, needs_libtpu

# One of each kind: pointwise, random, windows, reductions, sorting, indexing, products, ...
_ENTRIES = (
    *("add", "div.floor_rounding", "pow", "erf", "normal", "where", "cumsum", "sum", "argmax"),
    *("sort", "index_put", "gather", "scatter_add", "nn.functional.conv2d", "bmm", "fft.rfft"),
    *("nn.functional.layer_norm", "nn.functional.max_pool2d", "nn.functional.cross_entropy"),
    *("nn.functional.embedding", "nn.functional.scaled_dot_product_attention", "lu_unpack"),
    *("cholesky", "cholesky_inverse", "cholesky_solve", "geqrf", "ormqr", "triangular_solve"),
    *("matrix_exp", "lu_solve", "nn.functional.adaptive_avg_pool3d", "igamma", "igammac"),
)


@needs_libtpu
@needs_cuda
def test_rules_compile() -> None:
    topologies = [lazyxla.aot.topology(name) for name in ("v5e:2x2", "h100")]
    with_rule = {
        topology.platform: set(registry.names(topology.platform)) for topology in topologies
    }
    linalg = [name for name in entries() if name.startswith("linalg")]
    found = find(set.union(*with_rule.values()), torch.float32, (*_ENTRIES, *linalg))
    found |= made_by_hand(torch.float32)
    for topology in topologies:
        platform = topology.platform
        programs = {name: p for name, p in found.items() if name in with_rule[platform]}
        assert len(programs) > 80
        assert not with_rule[platform] - set(registry.names()) - programs.keys()
        refused = {name: refusal(topology, program) for name, program in programs.items()}
        expected = {name for *of, name in REFUSED if of == [platform, "float32"]} & programs.keys()
        wrong = {name: why for name, why in refused.items() if (why is None) == (name in expected)}
        assert not wrong


@needs_libtpu
def test_attention_over_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither way needs the 256 MiB of all scores in float32."""
    monkeypatch.setattr(TpuBuilder, "attention", TpuBuilder.attention._replace(kernel=None))
    topology = lazyxla.aot.topology("v5e:2x2")
    x = torch.empty(1, 1, 8192, 64, dtype=torch.bfloat16, device="meta")
    sums = torch.empty(1, 1, 8192, device="meta")
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    calls = {name: (x, x, x), f"{name}_backward": (x, x, x, x, x, sums)}
    for operator, tensors in calls.items():
        compiled = topology.compile(Call((*tensors, 0.0, True), {}).program(operator))
        assert compiled.memory_stats()["temporary"] < 32 << 20


@needs_libtpu
def test_a_refusal_is_told() -> None:
    program = record("aten::exp", torch.ones(1)).program
    spec = program.inputs[0]._replace(shape=(1 << 33,))
    program = program._replace(inputs=[spec], nodes=[program.nodes[0]._replace(outputs=(spec,))])
    message = refusal(lazyxla.aot.topology("v5e:2x2"), program)
    assert message is not None
    assert message.startswith("OutOfMemoryError: the program does not fit in the memory of one TPU")
    assert "PJRT_Compile: RESOURCE_EXHAUSTED" in message
