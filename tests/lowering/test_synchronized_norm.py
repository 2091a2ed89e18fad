"""Batch norm over several processes: operators without CPU kernels, against the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lazyxla
from lazyxla.lowering import Node, Program, Ref, TensorSpec
from tests.lowering.harness import execute

_SHAPES = [(4, 3), (2, 3, 5), (2, 3, 4, 5)]
_DTYPES = [torch.float32, torch.bfloat16, torch.float64]
_EPS = 1e-3


def run(op: str, *args: Any, outputs: list[Tensor | None]) -> list[Tensor]:
    """Runs the rule; `outputs` have the expected dtypes and shapes."""
    inputs = [a for a in args if isinstance(a, Tensor)]
    numbers = iter(range(len(inputs)))
    bound = tuple(Ref(next(numbers)) if isinstance(a, Tensor) else a for a in args)
    specs = [TensorSpec(t.dtype, tuple(t.shape)) for t in outputs if t is not None]
    refs = [Ref(len(inputs) + i) for i in range(len(specs))]
    node = Node(f"aten::{op}", bound, tuple(specs), None)
    program = Program([TensorSpec(t.dtype, tuple(t.shape)) for t in inputs], [node], refs, [], {})
    return execute(program, inputs)[0]


def close(got: list[Tensor], wanted: list[Tensor], like: torch.dtype) -> None:
    tolerance = {} if like != torch.bfloat16 else {"rtol": 1e-2, "atol": 1e-2}
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), **tolerance)


def accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.bfloat16 else dtype


def over(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def along(parameter: Tensor, x: Tensor) -> Tensor:
    return parameter.reshape(1, -1, *[1] * (x.dim() - 2))


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(x, over(x), correction=0)
    return mean, (variance + _EPS).rsqrt()


def some(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Input, gradient, weight and bias."""
    torch.manual_seed(0)
    x, grad = (torch.randn(2, *shape) * 2 + 1).to(dtype)
    return x, grad, torch.rand(3) + 0.5, torch.randn(3)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("shape", _SHAPES)
def test_stats(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, *_ = some(shape, dtype)
    like = torch.empty(3, dtype=accumulated(dtype))
    results = run("batch_norm_stats", x, _EPS, outputs=[like, like])
    close(results, [*statistics(x.double())], torch.float32)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("affine", [True, False])
def test_elemt(shape: tuple[int, ...], dtype: torch.dtype, affine: bool) -> None:
    x, _, weight, bias = some(shape, dtype)
    mean, rstd = (s.to(accumulated(dtype)) for s in statistics(x.double()))
    parameters = (weight.to(dtype), bias.to(dtype)) if affine else (None, None)
    results = run("batch_norm_elemt", x, *parameters, mean, rstd, _EPS, outputs=[x])
    expected = (x.double() - along(mean, x)) * along(rstd, x)
    if affine:
        expected = expected * along(parameters[0], x) + along(parameters[1], x)
    close(results, [expected], dtype)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("affine", [True, False])
def test_gradients(shape: tuple[int, ...], dtype: torch.dtype, affine: bool) -> None:
    """Both operators, for two processes of which each has one of the samples or more."""
    x, grad, weight, bias = some(shape, dtype)
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    mean, rstd = statistics(leaves[0])
    y = (leaves[0] - along(mean, x)) * along(rstd, x) * (along(leaves[1], x) if affine else 1)
    y = y + along(leaves[2], x)
    expected = torch.autograd.grad(y, leaves if affine else [leaves[0], leaves[2]], grad.double())
    mean, rstd = mean.detach().to(accumulated(dtype)), rstd.detach().to(accumulated(dtype))
    given = weight.to(accumulated(dtype)) if affine else None
    parts = [
        run(
            "batch_norm_backward_reduce",
            *(grad[rows].contiguous(), x[rows].contiguous(), mean, rstd, given, True, affine, True),
            outputs=[mean, mean, mean if affine else None, mean],
        )
        for rows in (slice(0, 1), slice(1, None))
    ]
    summed = [sum(pair) for pair in zip(*parts)]
    counts = torch.tensor([[n * x[0, 0].numel()] for n in (1, len(x) - 1)], dtype=torch.int32)
    (grad_x,) = run(
        "batch_norm_backward_elemt",
        *(grad, x, mean, rstd, given, summed[0], summed[1], counts),
        outputs=[x],
    )
    close([grad_x, *summed[2:]], [*expected], dtype)


def on_device(*values: Any) -> list[Any]:
    return [v.to("lazyxla") if isinstance(v, Tensor) else v for v in values]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("with_counts", [True, False])
def test_gathered(dtype: torch.dtype, tracked: bool, with_counts: bool) -> None:
    """Running statistics are written, which the schema does not say."""
    before = lazyxla.fallbacks()
    torch.manual_seed(0)
    parts = [torch.randn(n, 3, 4, dtype=dtype) + 5 for n in ((2, 1, 5) if with_counts else (3, 3))]
    mean, rstd = (torch.stack(s) for s in zip(*(statistics(p) for p in parts)))
    counts = [p.numel() // 3 for p in parts]
    running = [torch.randn(3, dtype=dtype), torch.rand(3, dtype=dtype)] if tracked else [None, None]
    ours = on_device(*running)
    name = "batch_norm_gather_stats" + ("_with_counts" if with_counts else "")
    count = torch.tensor(counts, dtype=dtype) if with_counts else counts[0]
    head, tail = on_device(parts[0], mean, rstd), on_device(0.3, _EPS, count)
    results = getattr(torch, name)(*head, *ours, *tail)
    expected = torch.ops.aten._native_batch_norm_legit_functional(
        torch.cat(parts), None, None, *(running if tracked else (mean[0], mean[0])), True, 0.3, _EPS
    )
    found = [t.cpu() for t in (*results, *(ours if tracked else ()))]
    wanted = [*expected[1:3], *(expected[3:] if tracked else ())]
    torch.testing.assert_close(found, wanted)
    assert lazyxla.fallbacks() == before


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_update_stats(tracked: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(4, 3, 5) * 3).to(dtype)
    running = [torch.randn(3), torch.rand(3)] if tracked else [None, None]
    ours = on_device(*running)
    results = torch.batch_norm_update_stats(x.to("lazyxla"), *ours, 0.3)
    expected = torch.batch_norm_update_stats(x, *running, 0.3)
    for got, wanted in zip((*results, *ours), (*expected, *running)):
        assert (got is None) == (wanted is None)
        if got is not None:
            torch.testing.assert_close(got.cpu(), wanted)
