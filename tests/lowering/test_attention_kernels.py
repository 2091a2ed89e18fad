"""Attention's kernels for TPUs and GPUs, interpreted on the CPU, against PyTorch's CPU kernels."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lazyxla.lowering import Program, Target, jax_call, lower_to_text
from lazyxla.lowering.cuda import attention as attention_cuda
from lazyxla.lowering.cuda import flash_attention
from lazyxla.lowering.tpu import attention as attention_tpu
from tests.calls import Call
from tests.lowering.harness import execute, record

FORWARD = "aten::_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = f"{FORWARD}_backward"
DROPOUT = "lazyxla::dropout_attention"
TPU = Target("tpu")
CUDA = Target("cuda", "NVIDIA H100 80GB HBM3", compute_capability=(9, 0))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels become plain operations, and take small tiles, so that there are several in each row.
    Those for GPUs multiply float32 with all its bits then."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as tpu

    make = tpu.make_splash_mha

    @functools.wraps(make)
    def interpreted(*args: Any, **kwargs: Any) -> Any:
        return make(*args, **{**kwargs, "interpret": True})

    monkeypatch.setattr(tpu, "make_splash_mha", interpreted)
    monkeypatch.setattr(attention_tpu, "_TILE", 128)
    monkeypatch.setattr(attention_tpu, "_LEAST_SCORES", 0)
    monkeypatch.setattr(flash_attention, "INTERPRET", True)
    monkeypatch.setattr(attention_cuda, "_DTYPES", (torch.bfloat16, torch.float32))
    monkeypatch.setattr(attention_cuda, "_LEAST_SCORES", 0)
    jax_call._trace.cache_clear()
    yield
    jax_call._trace.cache_clear()


Case = tuple[tuple[int, int, int, int, int], dict[str, Any]]
"""Heads of queries and keys, rows, columns, numbers per head; and further arguments."""


def some(shape: tuple[int, ...]) -> Tensor:
    """Bools of which the first row sees nothing."""
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.7
    if shape[-2] > 1:
        seen[..., 0, :] = False
    return seen


def bias(shape: tuple[int, ...]) -> Tensor:
    """Numbers to add to scores."""
    seen = some(shape)
    return seen.float().cumsum(-1).div(9).masked_fill(~seen, -math.inf)


def least(shape: tuple[int, ...]) -> Tensor:
    """Numbers to add to scores, of which the first row is as good as equal for all columns."""
    return torch.zeros(shape).masked_fill(~some(shape), torch.finfo(torch.float32).min)


CASES: dict[str, tuple[Target, Case]] = {
    "tpu: plain": (TPU, ((2, 2, 256, 384, 64), {})),
    "tpu: wide": (TPU, ((2, 2, 128, 256, 128), {})),
    "tpu: grouped heads": (TPU, ((4, 2, 256, 256, 40), {"is_causal": True, "scale": 0.2})),
    "tpu: one head of keys": (TPU, ((3, 1, 128, 256, 64), {})),
    "tpu: more rows than columns": (TPU, ((2, 1, 384, 128, 64), {"is_causal": True})),
    "tpu: more columns than rows": (TPU, ((2, 1, 128, 384, 64), {"is_causal": True})),
    "cuda: plain": (CUDA, ((2, 2, 256, 256, 64), {})),
    "cuda: wide": (CUDA, ((2, 2, 128, 128, 128), {})),
    "cuda: grouped heads": (CUDA, ((4, 2, 150, 150, 40), {"is_causal": True, "scale": 0.2})),
    "cuda: one head of keys": (CUDA, ((3, 1, 256, 256, 64), {"is_causal": True})),
    "cuda: more rows than columns": (CUDA, ((2, 1, 150, 70, 64), {"is_causal": True})),
    "cuda: more columns than rows": (CUDA, ((2, 1, 5, 150, 24), {"is_causal": True})),
    "cuda: mask": (CUDA, ((2, 2, 70, 150, 32), {"attn_mask": bias((2, 1, 70, 150))})),
    "cuda: mask of keys": (CUDA, ((2, 2, 70, 150, 32), {"attn_mask": bias((2, 1, 1, 150))})),
    "cuda: one mask for all": (CUDA, ((2, 2, 70, 70, 32), {"attn_mask": bias((70, 70))})),
    "cuda: mask of the least number": (CUDA, ((2, 2, 70, 70, 32), {"attn_mask": least((70, 70))})),
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
        rest = {"attn_mask": kwargs.get("attn_mask"), "scale": kwargs.get("scale")}
        ours = record(name, *args, *extra, **rest)
        doubles = [x.double() for x in args]
        if name == BACKWARD:
            doubles[4:] = exact
        if rest["attn_mask"] is not None:
            rest["attn_mask"] = rest["attn_mask"].double()
        exact = record(name, *doubles, *extra, **rest).expected
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
        # The logarithm of the sum of a row that sees nothing; PyTorch's kernel has 0 there.
        ours = ours.masked_fill(ours == -math.inf, 0)
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
    assert of_cuda(rows=128) == of_cuda(rows=197) == of_cuda(columns=1000) == taken
    assert of_cuda(size=20) == of_cuda(size=80) == of_cuda(size=128) == taken
    assert of_cuda(mask=torch.zeros(512, 512, dtype=torch.bfloat16)) == taken
    assert of_cuda(mask=torch.zeros(1, 1, 1, 512, dtype=torch.bfloat16)) == taken
    for capability in ((7, 5), None):
        assert of_cuda(target=Target("cuda", "", capability)) == PLAIN
    assert of_cuda(rows=127, columns=128) == PLAIN  # short
    assert of_cuda(dtype=torch.float32) == of_cuda(dtype=torch.float64) == PLAIN
    assert of_cuda(size=8) == of_cuda(size=256) == PLAIN


@pytest.mark.parametrize(
    ("heads", "rows", "columns", "masked", "is_causal"),
    [((2, 2), 70, 150, True, False), ((4, 2), 64, 64, False, True), ((1, 1), 33, 5, False, False)],
)
def test_dropout(
    heads: tuple[int, int],
    rows: int,
    columns: int,
    masked: bool,
    is_causal: bool,
    interpreted: None,
) -> None:
    """The kernels' results and gradients are those of XLA's operations, which drop the same."""
    query, key, value, grad = tensors((*heads, rows, columns, 32), torch.float32)
    mask = some((2, 1, rows, columns)) if masked else None
    rest = (0.25, is_causal, None)
    calls = {}
    for target in (Target("cuda"), CUDA):
        forward = Call((query, key, value, mask, *rest), {})
        given = [x for x in (query, key, value, mask) if x is not None]
        program = forward.program(DROPOUT)
        plain = "dot_general" in main(program, target)
        assert plain == (target != CUDA)
        result, sums, stream = execute(program, given, target)[0]
        back = Call((grad, query, key, value, mask, result, sums, stream, *rest), {})
        gradients = execute(
            back.program(f"{DROPOUT}_backward"), [grad, *given, result, sums, stream], target
        )[0]
        calls[plain] = [result, sums, *gradients]
    for ours, theirs in zip(calls[False], calls[True], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_too_many_weights_to_drop() -> None:
    """More than 32 bits with a sign can count: over blocks of rows they are never all there."""
    for rows, taken in ((1 << 14, True), (1 << 15, False)):
        x = torch.empty(1, 2, rows, 16, dtype=torch.bfloat16, device="meta")
        program = Call((x, x, x, None, 0.25, False, None), {}).program(DROPOUT)
        assert ("@__gpu$xla.gpu" in lower_to_text(program, CUDA)) == taken


@pytest.mark.parametrize(
    ("target", "ours", "name"),
    [(TPU, attention_tpu, "_splash_attention_bwd"), (CUDA, attention_cuda, "CompilerParams")],
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
