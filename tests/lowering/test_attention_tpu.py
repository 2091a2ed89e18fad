"""Attention's kernel for TPUs, interpreted on the CPU, against PyTorch's CPU kernels."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lazyxla.lowering import Program, jax_call
from lazyxla.lowering.module import lower_to_text
from lazyxla.lowering.rules import attention_tpu
from tests.lowering.harness import execute, record

FORWARD = "aten::_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = f"{FORWARD}_backward"


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels become plain operations, in small tiles, so that there are several in each row."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    make = functools.partial(kernel.make_splash_mha, interpret=True)
    monkeypatch.setattr(kernel, "make_splash_mha", make)
    monkeypatch.setattr(attention_tpu, "_TILE", 128)
    monkeypatch.setattr(attention_tpu, "_LEAST_SCORES", 0)
    jax_call._trace.cache_clear()
    yield
    jax_call._trace.cache_clear()


# Heads of queries and keys, rows, columns, numbers per head, and further arguments.
CASES: dict[str, tuple[tuple[int, int, int, int, int], dict[str, Any]]] = {
    "plain": ((2, 2, 256, 384, 64), {}),
    "wide": ((2, 2, 128, 256, 128), {}),
    "grouped heads": ((4, 2, 256, 256, 40), {"is_causal": True, "scale": 0.2}),
    "one head of keys": ((3, 1, 128, 256, 64), {}),
    "more rows than columns": ((2, 1, 384, 128, 64), {"is_causal": True}),
    "more columns than rows": ((2, 1, 128, 384, 64), {"is_causal": True}),
}


def tensors(case: str, dtype: torch.dtype) -> list[Tensor]:
    heads, groups, rows, columns, size = CASES[case][0]
    generator = torch.Generator().manual_seed(rows + columns)
    shapes = [(2, heads, rows, size), *[(2, groups, columns, size)] * 2, (2, heads, rows, size)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def compare(case: str, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Our results, PyTorch's, and the exact ones: of the forward pass and of the gradients."""
    *inputs, grad = tensors(case, dtype)
    kwargs = CASES[case][1]
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
        assert "dot_general" not in main(ours.program, "tpu")
        results, _ = execute(ours.program, ours.inputs, "tpu")
        yield from zip(results, ours.expected, exact, strict=True)
        calls.append((BACKWARD, [grad, *inputs, *ours.expected]))


def main(program: Program, platform: str) -> str:
    """The text of a program's own function, without those of JAX's that it calls."""
    text = lower_to_text(program, platform)
    return text[text.index("func.func public @main") :].split("\n  }")[0]


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case: str, interpreted: None) -> None:
    for ours, theirs, _ in compare(case, torch.float32):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("case", ["plain", "wide", "one head of keys"])
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
    columns: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    platform: str = "tpu",
    device_kind: str = "",
    mask: Tensor | None = None,
) -> list[int]:
    """How many kernels the programs of the forward pass and of the gradients have."""
    x, y = torch.ones(1, 1, rows, 8, dtype=dtype), torch.ones(1, 1, columns, 8, dtype=dtype)
    found = record(FORWARD, x, y, y, 0.0, False, attn_mask=mask)
    back = record(BACKWARD, x, x, y, y, *found.expected, 0.0, False, attn_mask=mask)
    texts = [lower_to_text(r.program, platform, device_kind) for r in (found, back)]
    return [text.count("@tpu_custom_call") for text in texts]


def test_what_the_kernel_is_taken_for() -> None:
    taken, plain = [1, 2], [0, 0]
    assert kernels() == kernels(dtype=torch.float32) == taken
    assert kernels(rows=128, columns=2048) == kernels(rows=640) == taken
    assert kernels(device_kind="TPU v5 lite") == taken
    for platform in ("cpu", "cuda"):
        assert kernels(platform=platform) == plain
    assert kernels(rows=384) == plain  # short
    assert kernels(rows=1000) == kernels(columns=1000) == plain  # no whole tiles
    assert kernels(dtype=torch.float16) == kernels(dtype=torch.float64) == plain
    assert kernels(mask=torch.zeros(512, 512, dtype=torch.bfloat16)) == plain
    assert kernels(device_kind="TPU v3") == plain  # has no products in bfloat16
    assert kernels(device_kind="TPU v3", dtype=torch.float32) == taken


def test_a_jax_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    monkeypatch.delattr(kernel, "_splash_attention_bwd")
    attention_tpu._kernel.cache_clear()
    try:
        assert kernels() == [0, 0]
    finally:
        attention_tpu._kernel.cache_clear()


@pytest.mark.parametrize("wanted", ["highest", "medium"])
def test_precision(wanted: str, interpreted: None) -> None:
    """Of products in float32, by torch.set_float32_matmul_precision."""
    before = torch.get_float32_matmul_precision()
    x = torch.ones(1, 1, 128, 8)
    program = record(FORWARD, x, x, x).program
    torch.set_float32_matmul_precision(wanted)
    try:
        text = lower_to_text(program, "tpu")
    finally:
        torch.set_float32_matmul_precision(before)
    assert text.count("dot_general") == 2
    assert text.count("precision = [HIGHEST, HIGHEST]") == (2 if wanted == "highest" else 0)
