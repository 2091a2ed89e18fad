"""Grouped products' kernels for TPUs: interpreted on the CPU, and where they are taken."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor

from lazyxla import aot
from lazyxla.lowering import Target, lower_to_text
from lazyxla.lowering.tpu import grouped_matmul as grouped_matmul_tpu
from tests.lowering.harness import record
from tests.support import needs_libtpu

jax.config.update("jax_platforms", "cpu")

OPERATOR = "aten::_grouped_mm"
TPU = Target("tpu", "TPU v5 lite")

# Rows, what is summed over, columns, and where groups end: tiles with several groups, groups with
# several tiles, with none of them, rows behind the last group and a last tile that is not whole.
CASES: list[tuple[int, int, int, list[int]]] = [
    (300, 128, 256, [10, 10, 200, 300]),
    (256, 640, 128, [0, 0, 256]),
    (512, 256, 128, [128, 256, 400]),
    (64, 128, 128, [3, 60]),
    (256, 128, 128, [0, 0, 0]),
    (256, 128, 128, [256, 256, 256]),
]


def example(*shape: int) -> Tensor:
    """Whole numbers: sums of their products are exact in any order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(len(shape))).float()


def interpreted(name: str, *args: Tensor, dtype: Any = jnp.float32, **kwargs: Any) -> Tensor:
    kernel = functools.partial(getattr(grouped_matmul_tpu, name), precision="highest")
    arrays = [jnp.asarray(x.numpy(), dtype if x.is_floating_point() else None) for x in args]
    result = kernel(*arrays, interpret=True, **kwargs)
    assert result.dtype == dtype
    return torch.tensor(np.asarray(result, np.float32))


def groups(ends: list[int]) -> list[slice]:
    return [slice(start, end) for start, end in zip([0, *ends], ends)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "inner", "columns", "ends"), CASES)
def test_rows_in_groups(
    rows: int, inner: int, columns: int, ends: list[int], transposed: bool, dtype: Any
) -> None:
    x, y = example(rows, inner), example(len(ends), inner, columns)
    expected = torch.zeros(rows, columns)
    for matrix, group in zip(y, groups(ends), strict=True):
        expected[group] = x[group] @ matrix
    given = y.transpose(1, 2).contiguous() if transposed else y
    offsets = torch.tensor(ends, dtype=torch.int32)
    ours = interpreted("rows_in_groups", x, given, offsets, dtype=dtype, transposed=transposed)
    expected = expected.bfloat16().float() if dtype == jnp.bfloat16 else expected
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("rows", "left", "columns", "ends"), CASES)
def test_sums_in_groups(rows: int, left: int, columns: int, ends: list[int]) -> None:
    x, y = example(rows, left), example(rows, columns)
    expected = torch.stack([x[group].T @ y[group] for group in groups(ends)])
    ours = interpreted("sums_in_groups", x, y, torch.tensor(ends, dtype=torch.int32))
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def is_kernel(
    x: tuple[int, ...], y: tuple[int, ...], dtype: Any = torch.bfloat16, target: Target = TPU
) -> bool:
    ends = torch.tensor([128, 256], dtype=torch.int32)
    recorded = record(OPERATOR, torch.ones(x, dtype=dtype), torch.ones(y, dtype=dtype), ends)
    text = lower_to_text(recorded.program, target)
    assert ("tpu_custom_call" in text) != ("ragged_dot" in text or "dot_general" in text)
    return "tpu_custom_call" in text


def test_where_they_are_taken() -> None:
    forms: list[Any] = [
        ((256, 128), (2, 128, 384)),
        ((128, 256), (256, 384)),
        ((2, 384, 128), (128, 256)),
    ]
    for form in forms:
        assert is_kernel(*form)
        assert is_kernel(*form, dtype=torch.float32)
        assert not is_kernel(*form, dtype=torch.float16)
        assert not is_kernel(*form, target=Target("tpu", "TPU v3"))
        assert not is_kernel(*form, target=Target("cuda"))
    assert is_kernel((300, 128), (2, 128, 384))
    assert not is_kernel((256, 120), (2, 120, 384))  # no whole tiles
    assert not is_kernel((256, 128), (2, 128, 376))


@needs_libtpu
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:1x1", "v6e:1x1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled(dtype: torch.dtype, topology: str) -> None:
    """A linear layer of experts, with its gradients: nothing is laid out anew."""

    def call(x: Tensor, weight: Tensor, ends: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        x, weight = (t.detach().requires_grad_() for t in (x, weight))
        result = torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
        return result.detach(), *torch.autograd.grad(result, (x, weight), grad)

    with torch.device("meta"):
        x, weight = torch.empty(2048, 1024, dtype=dtype), torch.empty(8, 2048, 1024, dtype=dtype)
        ends, grad = torch.empty(8, dtype=torch.int32), torch.empty(2048, 2048, dtype=dtype)
    program = aot.compile(call, (x, weight, ends, grad), topology=topology)
    text = program.optimized_hlo()
    assert len(re.findall(r"%grouped_matmul[.\d]* = ", text)) == 3
    assert program.flops == pytest.approx(3 * 2 * 2048 * 2048 * 1024, rel=0.01)
    large = re.findall(r"\[8,(?:2048,1024|1024,2048)\]\S* (\w[\w-]*)\(", text)
    assert "custom-call" in large
    assert not {"copy", "transpose", "fusion"} & set(large)
