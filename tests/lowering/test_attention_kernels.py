"""Attention's kernels for TPUs and GPUs, interpreted on the CPU, against PyTorch's CPU kernels."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lazyxla.lowering import Program, Target, jax_call, lower_to_text
from lazyxla.lowering.cuda import attention as attention_cuda
from lazyxla.lowering.tpu import attention as attention_tpu
from tests.lowering.harness import execute, record

FORWARD = "aten::_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = f"{FORWARD}_backward"
TPU = Target("tpu")
CUDA = Target("cuda", "NVIDIA H100 80GB HBM3", compute_capability=(9, 0))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels become plain operations, and on TPUs small tiles, so that there are several in each
    row. Those for GPUs multiply float32 with all its bits then."""
    from jax.experimental.pallas.ops.gpu import attention as cuda
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as tpu

    def interpret(module: Any, name: str) -> None:
        function = getattr(module, name)

        @functools.wraps(function)
        def interpreted(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **{**kwargs, "interpret": True})

        monkeypatch.setattr(module, name, interpreted)

    interpret(tpu, "make_splash_mha")
    interpret(cuda, "mha")
    interpret(cuda, "_mha_backward")
    monkeypatch.setattr(attention_tpu, "_TILE", 128)
    monkeypatch.setattr(attention_tpu, "_LEAST_SCORES", 0)
    monkeypatch.setattr(attention_cuda, "_DTYPES", (torch.bfloat16, torch.float32))
    monkeypatch.setattr(attention_cuda, "_LEAST_ROWS", 0)
    jax_call._trace.cache_clear()
    yield
    jax_call._trace.cache_clear()


Case = tuple[tuple[int, int, int, int, int], dict[str, Any]]
"""Heads of queries and keys, rows, columns, numbers per head; and further arguments."""

CASES: dict[str, tuple[Target, Case]] = {
    "tpu: plain": (TPU, ((2, 2, 256, 384, 64), {})),
    "tpu: wide": (TPU, ((2, 2, 128, 256, 128), {})),
    "tpu: grouped heads": (TPU, ((4, 2, 256, 256, 40), {"is_causal": True, "scale": 0.2})),
    "tpu: one head of keys": (TPU, ((3, 1, 128, 256, 64), {})),
    "tpu: more rows than columns": (TPU, ((2, 1, 384, 128, 64), {"is_causal": True})),
    "tpu: more columns than rows": (TPU, ((2, 1, 128, 384, 64), {"is_causal": True})),
    "cuda: plain": (CUDA, ((2, 2, 256, 256, 64), {})),
    "cuda: wide": (CUDA, ((2, 2, 128, 128, 128), {})),
    "cuda: grouped heads": (CUDA, ((4, 2, 256, 256, 40), {"is_causal": True, "scale": 0.2})),
    "cuda: one head of keys": (CUDA, ((3, 1, 256, 256, 64), {"is_causal": True})),
}


def tensors(sizes: tuple[int, int, int, int, int], dtype: torch.dtype) -> list[Tensor]:
    heads, groups, rows, columns, size = sizes
    generator = torch.Generator().manual_seed(rows + columns)
    shapes = [(2, heads, rows, size), *[(2, groups, columns, size)] * 2, (2, heads, rows, size)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def compare(case: str, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Our results, PyTorch's, and the exact ones: of the forward pass and of the gradients."""
    target, (sizes, kwargs) = CASES[case]
    *inputs, grad = tensors(sizes, dtype)
    calls: list[tuple[str, list[Tensor]]] = [(FORWARD, inputs)]
    exact: list[Tensor] = []
    for _ in range(2):
        name, args = calls[-1]
        extra = [0.0, kwargs.get("is_causal", False)]
        rest = {"attn_mask": None, "scale": kwargs.get("scale")}
        ours = record(name, *args, *extra, **rest)
        wide = [x.double() for x in args]
        if name == BACKWARD:
            wide[4:] = exact
        exact = record(name, *wide, *extra, **rest).expected
        assert "dot_general" not in main(ours.program, target)
        results, _ = execute(ours.program, ours.inputs, target)
        yield from zip(results, ours.expected, exact, strict=True)
        calls.append((BACKWARD, [grad, *inputs, *ours.expected]))


def main(program: Program, target: Target) -> str:
    """The text of a program's own function, without those of JAX's that it calls."""
    text = lower_to_text(program, target)
    return text[text.index("func.func public @main") :].split("\n  }")[0]


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case: str, interpreted: None) -> None:
    for ours, theirs, _ in compare(case, torch.float32):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("case", [name for name in CASES if re.search("plain|wide|one head", name)])
def test_half_precision(case: str, interpreted: None) -> None:
    """As near to the exact result as the CPU's kernel, whose own error is beyond the tolerances."""
    for ours, theirs, exact in compare(case, torch.bfloat16):
        assert ours.dtype == theirs.dtype
        if ours.dtype == torch.float32:  # logarithms of sums over scores of rounded queries
            torch.testing.assert_close(ours.bfloat16(), theirs.bfloat16())
            continue
        error, allowed = ((x.double() - exact).abs().max() for x in (ours, theirs))
        assert error <= 2 * allowed


def kernels(
    rows: int = 512,
    columns: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    target: Target = TPU,
    mask: Tensor | None = None,
    size: int = 16,
) -> list[int]:
    """How many kernels the programs of the forward pass and of the gradients have."""
    columns = rows if columns is None else columns
    x, y = (torch.ones(1, 1, length, size, dtype=dtype) for length in (rows, columns))
    found = record(FORWARD, x, y, y, 0.0, False, attn_mask=mask)
    back = record(BACKWARD, x, x, y, y, *found.expected, 0.0, False, attn_mask=mask)
    texts = [lower_to_text(r.program, target) for r in (found, back)]
    return [text.count("@tpu_custom_call") + text.count("@__gpu$xla.gpu") for text in texts]


PLAIN = [0, 0]


def test_what_the_kernel_for_tpus_is_taken_for() -> None:
    taken = [1, 2]
    assert kernels() == kernels(dtype=torch.float32) == taken
    assert kernels(rows=128, columns=2048) == kernels(rows=640) == taken
    assert kernels(target=Target("tpu", "TPU v5 lite")) == taken
    for platform in ("cpu", "cuda"):
        assert kernels(target=Target(platform)) == PLAIN
    assert kernels(rows=384) == PLAIN  # short
    assert kernels(rows=1000) == kernels(columns=1000) == PLAIN  # no whole tiles
    assert kernels(dtype=torch.float16) == kernels(dtype=torch.float64) == PLAIN
    assert kernels(mask=torch.zeros(512, 512, dtype=torch.bfloat16)) == PLAIN
    old = Target("tpu", "TPU v3")  # has no products in bfloat16
    assert kernels(target=old) == PLAIN
    assert kernels(target=old, dtype=torch.float32) == taken


def test_what_the_kernels_for_gpus_are_taken_for() -> None:
    taken = [1, 2]
    of_cuda = functools.partial(kernels, target=CUDA)
    assert of_cuda() == of_cuda(dtype=torch.float16) == taken
    assert of_cuda(rows=256) == of_cuda(rows=640) == of_cuda(size=80) == of_cuda(size=128) == taken
    for capability in ((7, 5), None):
        assert of_cuda(target=Target("cuda", "", capability)) == PLAIN
    assert of_cuda(rows=128) == PLAIN  # short
    assert of_cuda(rows=1000) == of_cuda(columns=1024) == PLAIN
    assert of_cuda(dtype=torch.float32) == of_cuda(dtype=torch.float64) == PLAIN
    assert of_cuda(mask=torch.zeros(512, 512, dtype=torch.bfloat16)) == PLAIN
    assert of_cuda(size=8) == of_cuda(size=256) == PLAIN


@pytest.mark.parametrize(
    ("target", "ours", "name"),
    [(TPU, attention_tpu, "_splash_attention_bwd"), (CUDA, attention_cuda, "_mha_backward")],
    ids=["tpu", "cuda"],
)
def test_a_jax_without_the_kernel(
    target: Target, ours: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ours._kernel()
    monkeypatch.delattr(module, name)
    ours._kernel.cache_clear()
    try:
        assert kernels(target=target) == PLAIN
    finally:
        ours._kernel.cache_clear()


@pytest.mark.parametrize("wanted", ["highest", "medium"])
def test_precision(wanted: str, interpreted: None) -> None:
    """Of products in float32 on TPUs, by torch.set_float32_matmul_precision."""
    before = torch.get_float32_matmul_precision()
    x = torch.ones(1, 1, 128, 8)
    program = record(FORWARD, x, x, x).program
    torch.set_float32_matmul_precision(wanted)
    try:
        text = lower_to_text(program, TPU)
    finally:
        torch.set_float32_matmul_precision(before)
    assert text.count("dot_general") == 2
    assert text.count("precision = [HIGHEST, HIGHEST]") == (2 if wanted == "highest" else 0)
