"""Attention of so many scores that it goes over blocks of rows: as that of all rows at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lazyxla
from lazyxla.lowering import Target, lower_to_text
from lazyxla.lowering.cpu import sums
from lazyxla.lowering.cpu.builder import CpuBuilder
from lazyxla.lowering.cuda.builder import CudaBuilder
from lazyxla.lowering.rules import attention_blocks
from lazyxla.lowering.tpu.builder import TpuBuilder
from tests.calls import Call
from tests.support import counted
from tests.test_attention import (
    CASES,
    N,
    attend,
    attend_with,
    check_as_on_the_cpu,
    check_half_precision,
    inputs,
)

pytestmark = pytest.mark.cuda

FORWARD = "aten::_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = f"{FORWARD}_backward"

# Rows and columns. With blocks of 4 rows: a smaller last block, and more columns than a row sees.
SIZES = [(22, 19), (16, 23)]


def from_so_many_scores(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every platform attention goes over blocks from `count` scores on."""
    for builder in (CpuBuilder, CudaBuilder, TpuBuilder):
        changed = builder.attention._replace(most_scores=count)
        monkeypatch.setattr(builder, "attention", changed)


@pytest.fixture
def blocks_of_4(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few scores are taken as many. No other test may have made programs of the same sizes."""
    loops = attention_blocks._loops
    used = []

    def watched(*args: Any) -> Any:
        found = list(loops(*args))
        used.extend(found)
        return found

    for name, value in {"PER_BLOCK": 0, "LEAST_ROWS": 4, "_loops": watched}.items():
        monkeypatch.setattr(attention_blocks, name, value)
    from_so_many_scores(0, monkeypatch)
    lazyxla.reset_counters()
    yield
    assert any(blocks > 1 for _, blocks, *_ in used)


@pytest.mark.parametrize(
    ("dtype", "sizes"), [(torch.float32, SIZES[0]), (torch.float64, SIZES[1])], ids=str
)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(
    case: str, dtype: torch.dtype, sizes: tuple[int, int], blocks_of_4: None
) -> None:
    check_as_on_the_cpu(*inputs(case, dtype, *sizes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["grouped heads", "mask of numbers"])
def test_half_precision(case: str, dtype: torch.dtype, blocks_of_4: None) -> None:
    check_half_precision(*inputs(case, dtype, *SIZES[0]))


def dropped(shape: tuple[int, ...], p: float, **kwargs: Any) -> Tensor:
    """What a call after torch.manual_seed(1) multiplies its weights, a shape, with."""
    rows, columns = shape[-2:]
    assert rows >= columns
    torch.manual_seed(1)
    zeros = torch.zeros(*shape[:2], rows, columns).to("lazyxla")
    eye = torch.eye(columns).expand(*shape[:2], columns, columns).to("lazyxla")
    keys = zeros[:, :, :columns]
    return F.scaled_dot_product_attention(zeros, keys, eye, dropout_p=p, **kwargs).cpu()


@pytest.mark.parametrize("case", [c for c in CASES if c != "mask of bools"])
def test_dropout(case: str, blocks_of_4: None) -> None:
    """The gradients are those of the weights that the forward pass has dropped."""
    rows, columns = SIZES[0]
    tensors, kwargs = inputs(case, torch.float64, rows, columns)
    shape = (N, CASES[case][0], rows, columns)
    kept = dropped(shape, 0.25, is_causal=kwargs.get("is_causal", False)) != 0
    seen = torch.ones(rows, columns).tril() if "is_causal" in kwargs else torch.ones(rows, columns)
    assert 0.7 < kept.sum() / seen.expand(shape).sum() < 0.8
    assert not torch.equal(kept[:, :, 8:12], kept[:, :, 12:16])  # each block draws its own
    torch.manual_seed(1)
    ours = attend("lazyxla", tensors, {**kwargs, "dropout_p": 0.25})
    for x, y in zip(ours, attend_with(kept / 0.75, tensors, kwargs), strict=True):
        torch.testing.assert_close(x.cpu(), y)
    assert lazyxla.fallbacks() == {}


def test_one_program_each_way(blocks_of_4: None) -> None:
    tensors = [torch.randn(2, 4, 21, 16).to("lazyxla").requires_grad_() for _ in range(3)]
    grad = torch.randn(2, 4, 21, 16).to("lazyxla")
    with lazyxla.eager_mode(True), counted() as n:
        result = F.scaled_dot_product_attention(*tensors, is_causal=True)
        torch.autograd.grad(result, tensors, grad)
    assert n.executions == 2
    assert not n.fallbacks


def test_a_mask_and_causal(blocks_of_4: None) -> None:
    """The operator itself takes both."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    (query, key, value), _ = inputs("plain", torch.float32, 20, 20)
    bias = torch.randn(20, 20)
    both = bias.masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf)
    expected = op(query, key, value, attn_mask=both)
    arguments = [x.to("lazyxla") for x in (query, key, value)]
    actual = op(*arguments, is_causal=True, attn_mask=bias.to("lazyxla"))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


def text(name: str, rows: int, is_causal: bool, platform: str = "cpu") -> str:
    """The lowered program for 8 heads, of XLA's operations only."""
    x, sums = torch.empty(1, 8, rows, 64, device="meta"), torch.empty(1, 8, rows, device="meta")
    tensors = (x, x, x, x, x, sums) if name == BACKWARD else (x, x, x)
    program = Call((*tensors, 0.0, is_causal), {}).program(name)
    return lower_to_text(program, Target(platform, host_calls=False))


def largest(program: str) -> int:
    """Elements of the largest value."""
    shapes = re.findall(r"tensor<((?:\d+x)*)[a-z]\w*>", program)
    return max(math.prod(map(int, shape.split("x")[:-1])) for shape in shapes)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", [FORWARD, BACKWARD])
def test_many_scores_are_never_in_memory_at_once(
    name: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = text(name, 8192, is_causal)
    assert largest(program) <= 2 * attention_blocks.PER_BLOCK
    loops = CpuBuilder.attention.causal_loops if is_causal else 1
    assert program.count("stablehlo.while") == loops
    # Its length does not depend on the rows, but for which sums are matmuls.
    monkeypatch.setattr(sums, "_LEAST_ROWS", 1 << 60)
    lengths = {len(text(name, rows, is_causal).splitlines()) for rows in (8192, 32768)}
    assert len(lengths) == 1


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", [FORWARD, BACKWARD])
def test_few_scores_are_taken_at_once(
    name: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = int((CpuBuilder.attention.most_scores / 8) ** 0.5)
    rows = few - 1
    program = text(name, rows, is_causal)
    assert "while" not in program
    assert largest(program) == 8 * rows**2
    assert "while" in text(name, few + 1, is_causal)
    from_so_many_scores(1 << 60, monkeypatch)
    assert text(name, rows, is_causal) == program


@pytest.mark.parametrize("name", [FORWARD, BACKWARD])
def test_a_tpu_takes_more_scores_at_once(name: str) -> None:
    """Of lengths that its kernel is not for."""
    few = int((TpuBuilder.attention.most_scores / 8) ** 0.5)
    assert "while" not in text(name, few - 1, False, "tpu")
    assert text(name, few + 1, False, "tpu").count("stablehlo.while") == 1
    assert "while" in text(name, few - 1, False)
