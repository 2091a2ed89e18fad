"""Attention over long sequences is a kernel on TPUs and GPUs: what their compilers tell of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lazyxla import aot
from lazyxla.config import settings
from lazyxla.lowering.builder.attention import Attention
from lazyxla.lowering.cuda.builder import CudaBuilder
from lazyxla.lowering.tpu.builder import TpuBuilder
from tests.support import needs_cuda, needs_libtpu

MiB = 2**20


def compile_attention(
    shape: tuple[int, int, int, int],
    groups: int,
    dtype: torch.dtype = torch.bfloat16,
    topology: str = "v5e:2x2",
    store: bool | Path = False,
    **kwargs: Any,
) -> aot.CompiledProgram:
    """The result for queries of `shape` (N, H, S, D), and the gradients."""
    samples, _, rows, size = shape
    query = torch.empty(shape, dtype=dtype, device="meta")
    key = torch.empty(samples, groups, rows, size, dtype=dtype, device="meta")

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        *inputs, grad = (x.detach().requires_grad_() for x in tensors)
        result = F.scaled_dot_product_attention(*inputs, enable_gqa=True, **kwargs)
        return result.detach(), *torch.autograd.grad(result, inputs, grad)

    return aot.compile(call, (query, key, key, query), topology=topology, store=store)


def kernels(program: aot.CompiledProgram) -> int:
    targets = re.findall(r'custom_call_target="([^"]*)"', program.optimized_hlo())
    return sum(target in ("tpu_custom_call", "__gpu$xla.gpu.triton") for target in targets)


@needs_libtpu
def test_no_scores_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (1, 8, 4096, 128)
    program = compile_attention(shape, 8, is_causal=True)
    assert kernels(program) == 3
    tiles = 8 * 36 * 512 * 512  # of 64 for each head, without those above the diagonal
    assert program.flops == pytest.approx(2 * 9 * 128 * tiles, rel=0.01)
    monkeypatch.setattr(TpuBuilder, "attention", Attention(most_scores=1 << 62))
    plain = compile_attention(shape, 8, is_causal=True)
    assert kernels(plain) == 0
    scores = 8 * 4096 * 4096 * 4
    assert plain.memory_stats()["temporary"] > scores
    assert program.memory_stats()["temporary"] < scores / 16


@needs_libtpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v6e:2x2"])
def test_compiles(topology: str, dtype: torch.dtype) -> None:
    """Heads of a size that is no multiple of lanes, for groups of queries."""
    program = compile_attention((1, 4, 1024, 80), 2, dtype, topology, scale=0.5)
    assert kernels(program) == 3


@needs_libtpu
def test_one_entry_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program with kernels is kept, and is the same for any number of chips."""
    monkeypatch.setattr(settings, "cache_size", 64)
    kept = []
    for topology in ("v5e:2x2", "v5e:1x1"):
        compile_attention((1, 2, 512, 64), 2, topology=topology, store=tmp_path)
        files = [p for p in (tmp_path / "programs").rglob("*") if p.is_file()]
        kept.append(sorted(p.name for p in files))
    assert kept[0] == kept[1]
    assert sum(name.startswith("program-") for name in kept[0]) == 1


@needs_libtpu
def test_chips_without_products_in_bfloat16_for_kernels() -> None:
    assert kernels(compile_attention((1, 2, 512, 64), 2, topology="v3:2x2")) == 0


@needs_libtpu
def test_short_sequences() -> None:
    assert kernels(compile_attention((4, 8, 256, 64), 8)) == 0


@needs_cuda
def test_no_scores_in_memory_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (1, 8, 4096, 128)
    program = compile_attention(shape, 8, topology="h100", is_causal=True)
    assert kernels(program) == 3
    monkeypatch.setattr(CudaBuilder, "attention", Attention(most_scores=1 << 62))
    plain = compile_attention(shape, 8, topology="h100", is_causal=True)
    assert kernels(plain) == 0
    scores = 8 * 4096 * 4096 * 2
    assert plain.memory_stats()["temporary"] > scores
    assert program.memory_stats()["temporary"] < scores / 8


@needs_cuda
@pytest.mark.parametrize("size", [16, 80, 128])
@pytest.mark.parametrize("topology", ["l4", "a100", "h100", "b200"])
def test_compiles_for_gpus(topology: str, size: int) -> None:
    """The kernels fit into the multiprocessors' memory, for groups of queries, too."""
    for dtype in (torch.bfloat16, torch.float16):
        program = compile_attention((1, 4, 640, size), 2, dtype, topology, scale=0.5)
        assert kernels(program) == 3
