"""PyTorch's kernels draw the random numbers that a compiled program draws."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lazyxla
from lazyxla.lowering.cpu.builder import CpuBuilder
from tests.support import DEVICE, counted


@pytest.fixture(autouse=True)
def _settings_as_before() -> Iterator[None]:
    yield
    lazyxla.settings.host_programs = False


def empty(dtype: torch.dtype = torch.float32, count: int = 101) -> torch.Tensor:
    return torch.empty(count, device=DEVICE, dtype=dtype)


def line(dtype: torch.dtype = torch.float32, count: int = 101) -> torch.Tensor:
    return torch.linspace(0, 1, count, dtype=dtype).to(DEVICE)


def attention(
    rows: int, dtype: torch.dtype = torch.float64, groups: int = 4, **kwargs: Any
) -> torch.Tensor:
    """The result and the gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, rows, 8), (2, groups, 7, 8), (2, groups, 7, 8)]
    inputs = [
        torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_()
        for shape in shapes
    ]
    with torch.enable_grad():
        result = F.scaled_dot_product_attention(
            *inputs, dropout_p=0.3, enable_gqa=groups < 4, **kwargs
        )
        gradients = torch.autograd.grad(result.square().sum(), inputs)
    return torch.cat([each.flatten() for each in (result.detach(), *gradients)])


def mask(rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Of bools, or of numbers to be added; bools of which the last rows hide all."""
    numbers = torch.arange(7 * rows).reshape(rows, 7)
    return (numbers < 30 if dtype == torch.bool else numbers / 9).to(DEVICE, dtype)


BITS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(7, 5, device=DEVICE),
    "rand, float64": lambda: torch.rand(7, 5, device=DEVICE, dtype=torch.float64),
    "rand, bfloat16": lambda: torch.rand(7, 5, device=DEVICE, dtype=torch.bfloat16),
    "rand, float16": lambda: torch.rand(7, 5, device=DEVICE, dtype=torch.float16),
    "rand, one": lambda: torch.rand((), device=DEVICE),
    "bernoulli": lambda: line().bernoulli(),
    "bernoulli, float64": lambda: line(torch.float64).bernoulli(),
    "bernoulli, one": lambda: torch.tensor(0.5, device=DEVICE).bernoulli(),
    "bernoulli_": lambda: empty().bernoulli_(0.3),
    "bernoulli_, integers": lambda: empty(torch.int64).bernoulli_(0.3),
    "bernoulli_, tensor": lambda: empty().bernoulli_(line()),
    "randint": lambda: torch.randint(-5, 1000, (77,), device=DEVICE),
    "randint, 64 bits": lambda: torch.randint(-(2**40), 2**50, (77,), device=DEVICE),
    "randint, uint8": lambda: torch.randint(100, (77,), device=DEVICE, dtype=torch.uint8),
    "random_, int64": lambda: empty(torch.int64).random_(),
    "random_, int32": lambda: empty(torch.int32).random_(),
    "random_, uint8": lambda: empty(torch.uint8).random_(),
    "random_, bool": lambda: empty(torch.bool).random_(),
    "random_, from": lambda: empty(torch.int64).random_(-5, None),
    "random_, all": lambda: empty(torch.int64).random_(-(2**63), None),
    "random_, all of int32": lambda: empty(torch.int32).random_(-(2**31), 2**31 - 1),
    "dropout of all": lambda: F.dropout(line(count=105), 1.0),
    "dropout2d": lambda: F.dropout2d(torch.ones(2, 3, 4, 4, device=DEVICE), 0.5),
}
"""What depends on the bits alone."""

ROUNDED: dict[str, Callable[[], torch.Tensor]] = {
    "uniform_": lambda: empty().uniform_(-2, 5),
    "uniform_, float16": lambda: empty(torch.float16).uniform_(-2, 5),
    "randn": lambda: torch.randn(1001, device=DEVICE),
    "randn, float64": lambda: torch.randn(1001, device=DEVICE, dtype=torch.float64),
    "normal_": lambda: empty().normal_(3, 0.5),
    "normal_, bfloat16": lambda: empty(torch.bfloat16).normal_(3, 0.5),
    "exponential_": lambda: empty().exponential_(2.0),
    "gumbel": lambda: F.gumbel_softmax(line(count=102)),
    "dropout": lambda: F.dropout(line(), 0.3),
    "dropout, bfloat16": lambda: F.dropout(line(torch.bfloat16), 0.3),
    "dropout, large": lambda: F.dropout(line(count=99_999), 0.3),
    "alpha dropout": lambda: F.alpha_dropout(line(count=104), 0.3, training=True),
    "attention": lambda: attention(9),
    "attention, float32": lambda: attention(9, torch.float32),
    "attention, causal": lambda: attention(10, is_causal=True),
    "attention, scaled": lambda: attention(11, scale=0.5),
    "attention, fewer heads of keys": lambda: attention(12, groups=2),
    "attention, mask": lambda: attention(13, attn_mask=mask(13, torch.bool)),
    "attention, float mask": lambda: attention(14, attn_mask=mask(14, torch.float64)),
}
"""What is computed from them, as closely as PyTorch compares by default."""


def draw(function: Callable[[], torch.Tensor], host_programs: bool) -> tuple[torch.Tensor, Any]:
    """What it gives, an operator at a time, and the counters. Not with a seed's first numbers."""
    lazyxla.settings.host_programs = host_programs
    with torch.no_grad(), lazyxla.eager_mode(True):
        torch.manual_seed(12345678901)  # more than 32 bits
        torch.rand(3, device=DEVICE).cpu()
        with counted() as n:
            result = function().cpu()
    return result, n


@pytest.mark.parametrize("name", [*BITS, *ROUNDED])
def test_numbers_are_those_of_compiled_programs(name: str) -> None:
    function = BITS.get(name) or ROUNDED[name]
    ours, n = draw(function, host_programs=True)
    assert n.compiles == 0
    assert n.host_programs > 0
    theirs, n = draw(function, host_programs=False)
    assert n.host_programs == 0
    exact = {"rtol": 0, "atol": 0} if name in BITS else {}
    torch.testing.assert_close(ours, theirs, **exact)


def test_attention_in_bfloat16() -> None:
    """The kernel rounds fewer of the values between."""
    ours, _ = draw(lambda: attention(15, torch.bfloat16), host_programs=True)
    theirs, _ = draw(lambda: attention(15, torch.bfloat16), host_programs=False)
    exact, _ = draw(lambda: attention(15), host_programs=True)
    assert (ours - exact).abs().max() <= (theirs - exact).abs().max() * 1.5


def test_attention_that_compiled_programs_compute_in_blocks() -> None:
    """Those draw for some rows at a time, from the same number of scores on."""
    rows = math.isqrt(CpuBuilder.attention.most_scores)
    for fewer, compiles in ((0, 1), (1, 0)):
        query = torch.ones(1, 1, rows - fewer, 8).to(DEVICE)
        call = functools.partial(F.scaled_dot_product_attention, query, query, query)
        _, n = draw(lambda call=call: call(dropout_p=0.3), True)
        assert n.compiles == compiles
