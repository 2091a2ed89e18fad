"""Operators over dimensions with bounds: values and gradients are those of the exact sizes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch.nn import functional as F
from torch.utils._sympy.functions import FloorDiv, Max, Mod

from lazyxla.dynamo import backend
from lazyxla.dynamo.padding import calls
from lazyxla.dynamo.padding.structure import (
    NotPaddableError,
    UniformDim,
    broadcast,
    grows,
    split,
    view,
)
from tests.support import assert_same
from tests.test_dynamo_padding import Dims, bounded, refusals

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever looks at padding finds nan, in arguments and in the gradients of results."""
    monkeypatch.setattr(calls, "PADDING", float("nan"))


def check_padded(
    function: Function,
    make: Callable[..., tuple[torch.Tensor, ...]],
    dims: Dims,
    sizes: list[tuple[int, ...]],
    strides: bool = True,
) -> None:
    """Compares results and gradients with the CPU's for several sizes; nothing is refused."""
    compiled = torch.compile(function, backend=backend, dynamic=True)
    with refusals() as refused:
        for size in sizes:
            args = make(*size)
            ours = bounded(args, dims, 4, 32)
            expected, result = function(*args), compiled(*ours)
            assert_same(result, expected, strides)
            pairs = [
                (mine, theirs)
                for mine, theirs in zip(_listed(result), _listed(expected), strict=True)
                if theirs.requires_grad
            ]
            if not pairs:
                continue
            gradients = [torch.randn_like(theirs) for _, theirs in pairs]
            torch.autograd.backward([theirs for _, theirs in pairs], gradients)
            torch.autograd.backward(
                [mine for mine, _ in pairs], [g.to("lazyxla") for g in gradients]
            )
            for mine, theirs in zip(ours, args, strict=True):
                if theirs.requires_grad:
                    torch.testing.assert_close(mine.grad.cpu(), theirs.grad, equal_nan=True)
    assert refused == []


def _listed(results: Any) -> list[torch.Tensor]:
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _rows(n: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(n)
    return (torch.randn(n, 6, requires_grad=True),)


def _batches(n: int, t: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(n)
    return (torch.randn(n, t, 3, requires_grad=True),)


ONE: dict[str, Function] = {
    "sum": lambda x: (x.sum(0), x.sum()),
    "mean": lambda x: (x.mean(0), x.mean(), x.mean(1)),
    "var": lambda x: (x.var(0), x.std(0, keepdim=True), *torch.var_mean(x, correction=0)),
    "extremes": lambda x: (x.amax(0), x.min(0)[0], x.max(), x.argmax(0), x.argmin()),
    "norms": lambda x: (x.norm(dim=0), torch.linalg.vector_norm(x, 3), x.logsumexp(0)),
    "truth": lambda x: ((x > 1).any(0), (x > -1).all(0), (x > 0).sum()),
    "softmax": lambda x: (x.softmax(0), x.log_softmax(0)),
    "cumulated": lambda x: (x.cumsum(0), x.logcumsumexp(0), x.cummax(0)[0]),
    "order": lambda x: (*x.sort(0), *x.topk(2, 0), *x.sort(0, descending=True)),
    "order with nan": lambda x: (x.detach().log().sort(0), x.sqrt().sort(0, descending=True))[0],
    "products": lambda x: (x @ x.t(), x.t() @ x, torch.outer(x[:, 0], x[:, 1])),
    "one position": lambda x: (x[-1], x[0], x[-2], x[2]),
    "parts": lambda x: (x[1:] * x[:-1], x[:3], x[-3:], x[-3:-1]),
    "flip": lambda x: x.flip(0),
    "concatenation": lambda x: torch.cat([x.new_zeros(2, 6), x]).softmax(0),
    "columns": lambda x: (torch.cat([x, x * 2], 1), torch.stack([x, -x], 1), x.chunk(2, 1)[1]),
    "flattened": lambda x: (x.reshape(-1), x.t().reshape(-1), x.view(-1, 2, 3).sum(1)),
    "repeated": lambda x: (x.repeat(2, 3), x.mean(0).expand(x.shape[0], -1) * x),
    "nan in padding": lambda x: ((1 / x).mean(0), x.abs().log().sum(0), (x / x).amax(0)),
    "norm of padding": lambda x: (F.normalize(x, dim=1).sum(0), F.normalize(x, dim=0)),
    "numbers": lambda x: (x.sum(0) / x.shape[0], x * x.shape[0], x.sum() / x.shape[0] ** 0.5),
    "positions": lambda x: x + torch.arange(1, x.shape[0] + 1, device=x.device)[:, None],
    "causal": lambda x: (
        (
            (x @ x.t()).masked_fill(
                torch.ones(x.shape[0], x.shape[0], dtype=torch.bool, device=x.device).triu(1),
                -float("inf"),
            )
        ).softmax(-1)
        @ x
    ),
    "layer norm": lambda x: (F.layer_norm(x, (6,)), F.rms_norm(x, (6,))),
    "group norm": lambda x: F.group_norm(x, 2),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "losses": lambda x: (
        F.mse_loss(x, x * 2 + 1),
        F.huber_loss(x, x.detach() * 3),
        F.smooth_l1_loss(x, x.detach() * 3),
        F.binary_cross_entropy(x.sigmoid(), x.detach().sigmoid()),
        F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()),
        F.l1_loss(x, x.detach().flip(1)),
        F.mse_loss(x, x.detach() * 2, reduction="sum"),
    ),
    "classes": lambda x: (
        F.cross_entropy(x, x.detach().argmin(1)),
        F.cross_entropy(x, x.detach().argmin(1), reduction="none").mean(),
        F.one_hot(x.argmax(1), 6).float().mean(0) * x.sum(),
    ),
    "look-ups": lambda x: (x.gather(1, x.argsort(1)), x.gather(0, x.argsort(0)), x[[0, -1]]),
    "activations": lambda x: (
        *(F.gelu(x).sum(0), F.softplus(x).mean(0), F.elu(x).amax(0), F.leaky_relu(x).sum(0)),
        *(F.hardtanh(x).var(0), F.hardswish(x).sum(0), F.mish(x).sum(0)),
    ),
    "covariance": lambda x: torch.cov(x.t()),
    "distances": lambda x: ((x[:, None] - x[None]) ** 2).sum(-1).mean(),
    "bfloat16": lambda x: (x.detach().bfloat16().mean(0), x.detach().bfloat16().softmax(0)),
    "integers": lambda x: (
        (x * 9).long().sum(0),
        (x * 9).int() // x.shape[0],
        (x * 9).long().amax(0) / x.shape[0],
    ),
    "a size as a result": lambda x: (x.sum(0), x),
}

TWO: dict[str, Function] = {
    "reductions": lambda x: (x.sum((0, 1)), x.mean(), x.amax((0, 1)), x.var()),
    "flattened": lambda x: (x.reshape(-1, 3).mean(0), x.transpose(0, 1).reshape(-1, 3).var(0)),
    "flattened as a whole": lambda x: x.reshape(-1).mean(),
    "flattened and back": lambda x: (x.view(-1, 3) @ x.new_ones(3, 2)).view(*x.shape[:2], 2),
    "flattened result": lambda x: (x.reshape(-1, 3) * 2, x.transpose(0, 1).reshape(-1, 3)),
    "products": lambda x: (x @ x.mT, torch.einsum("btc,bsc->ts", x, x)),
    "softmax": lambda x: (x.softmax(1).sum(0), (x @ x.mT).softmax(-1) @ x),
    "one position": lambda x: (x[:, -1], x[:, 0].mean(0)),
    "each row's own": lambda x: x[
        torch.arange(x.shape[0], device=x.device), (x.detach().sum(2) > 0).sum(1) - 1
    ],
    "shifted": lambda x: F.cross_entropy(
        x[:, :-1].reshape(-1, 3), x.detach().argmax(2)[:, 1:].reshape(-1)
    ),
    "flattened loss": lambda x: F.cross_entropy(
        x.view(-1, 3), x.detach().argmin(2).view(-1), reduction="none"
    ).mean(),
    "loss of images": lambda x: F.cross_entropy(x.transpose(1, 2), x.detach().argmin(2)),
    "cls": lambda x: torch.cat([x.new_ones(x.shape[0], 1, 3), x], 1).softmax(1)[:, 0],
    "numbers": lambda x: x.sum() / (x.shape[0] * x.shape[1]),
}


@pytest.mark.parametrize("name", ONE)
def test_one_size(name: str) -> None:
    check_padded(ONE[name], _rows, [(0, 0)], [(5,), (9,), (16,), (7,)])


@pytest.mark.parametrize("name", TWO)
def test_two_sizes(name: str) -> None:
    check_padded(TWO[name], _batches, [(0, 0), (0, 1)], [(6, 5), (9, 7), (5, 16), (10, 7)])


def test_attention_between_sequences_of_different_sizes() -> None:
    def make(n: int, t: int, s: int) -> tuple[torch.Tensor, ...]:
        sizes = ((n, 2, t, 3), (n, 2, s, 3), (n, 2, s, 3))
        return tuple(torch.randn(size, requires_grad=True) for size in sizes)

    dims = [(0, 0), (0, 2), (1, 2)]
    attend = F.scaled_dot_product_attention
    check_padded(attend, make, dims, [(6, 5, 7), (9, 7, 5), (5, 16, 11)])


@pytest.mark.parametrize("size", [lambda n: 80 - n, lambda n: n % 3 + 2], ids=["rest", "modulo"])
def test_sizes_that_shrink_while_others_grow_are_exact(size: Callable[[int], int]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.arange(size(x.shape[0]), device=x.device).sum() + x.sum()

    compiled = torch.compile(function, backend=backend, dynamic=True)
    with refusals() as refused:
        for rows in (5, 14):
            x = torch.randn(rows, 6)
            assert_same(compiled(*bounded((x,), [(0, 0)], 4, 64)), function(x))
    (text,) = refused
    assert "makes a tensor of" in text


def test_inference_whose_masks_are_used_by_several_parts() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = F.interpolate(x[None, None], scale_factor=2.0, mode="nearest").sum()
        return y + y.cpu().exp().log().to(x.device)

    def make(n: int) -> tuple[torch.Tensor, ...]:
        return (torch.full((n, 2), 0.25),)

    check_padded(function, make, [(0, 0)], [(5,)])


# --- Random compositions -------------------------------------------------------------------------

# Of a tensor [n, t, 4], to one.
_STEPS: list[Function] = [
    lambda x: x.tanh() * 2,
    lambda x: x - x.mean(0, keepdim=True),
    lambda x: x / (x.var(1, keepdim=True) + 1),
    lambda x: x.softmax(1),
    lambda x: x.softmax(0) + x,
    lambda x: x.cumsum(1).tanh(),
    lambda x: x * x.amax(0),
    lambda x: x + x[:, -1:].detach(),
    lambda x: x + x[-1],
    lambda x: x.flip(1) + x,
    lambda x: (x @ x.mT).softmax(-1) @ x,
    lambda x: F.layer_norm(x, (4,)),
    lambda x: (x.reshape(-1, 4) @ torch.eye(4, device=x.device)).view(x.shape) + 1,
    lambda x: (
        x.transpose(0, 1).reshape(-1, 4).sub(1).view(x.shape[1], x.shape[0], 4).transpose(0, 1)
    ),
    lambda x: x + torch.arange(x.shape[1], device=x.device)[:, None] / x.shape[1],
    lambda x: x * (x.detach() > 0).float().mean((0, 1)),
    lambda x: x.abs().log1p(),
    lambda x: torch.where(x > 0, x, x.mean()),
    lambda x: x / x.shape[0],
    lambda x: F.normalize(x, dim=1) + F.normalize(x, dim=2),
    lambda x: (1 / (x.abs() + 1)).cumsum(0).tanh(),
    lambda x: F.pad(x, (0, 2)).narrow(2, 1, 4),
    lambda x: x.gather(2, x.detach().argsort(2)),
    lambda x: torch.cat([x[:, :1], x], 1)[:, 1:] * 0.5,
]
_ENDS: list[Function] = [
    lambda x: x.mean(),
    lambda x: x.sum((0, 1)) / x.shape[1],
    lambda x: x[:, -1],
    lambda x: x.reshape(-1, 4).var(0),
    lambda x: x.logsumexp((0, 1)),
    lambda x: x,
    lambda x: x.amax(1),
    lambda x: F.mse_loss(x, x.detach() * 0.5),
]


@pytest.mark.parametrize("seed", range(48))
def test_random_compositions(seed: int) -> None:
    draw = random.Random(seed)
    steps = [*draw.choices(_STEPS, k=4), draw.choice(_ENDS)]

    def function(x: torch.Tensor) -> torch.Tensor:
        for step in steps:
            x = step(x)
        return x

    def make(n: int, t: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(seed)
        return (torch.randn(n, t, 4, requires_grad=True),)

    dims = draw.choice([[(0, 0)], [(0, 1)], [(0, 0), (0, 1)]])
    sizes = [(5, 6), (9, 7), (7, 13)] if len(dims) == 2 else [(6, 6), (9, 6), (7, 6)]
    if dims == [(0, 1)]:
        sizes = [(t, n) for n, t in sizes]
    check_padded(function, make, dims, sizes, strides=False)


# --- What dimensions consist of ------------------------------------------------------------------

S, T = sympy.symbols("s t", positive=True, integer=True)
PADDED = frozenset({S, T})


def test_views_keep_the_order_of_factors() -> None:
    assert split([4, S], [4 * S], PADDED) == ((4, S),)
    assert split([S, 12], [S * 3, 4], PADDED) == ((S, 3), (4,))
    assert split([S, 12, T], [S, 3, 4 * T], PADDED) == ((S,), (3,), (4, T))
    assert split([S, T], [1, S, 1, T], PADDED) == ((), (S,), (), (T,))
    for factors, shape in (([4, S], [S, 4]), ([S, T], [T, S]), ([S, 6], [2, 3 * S])):
        with pytest.raises(NotPaddableError):
            split(factors, shape, PADDED)


def test_which_sizes_grow() -> None:
    for size in (S, 3 * S - 2, S * T, -FloorDiv(-S, 4), FloorDiv(S, 2), Max(S, 9), S**2):
        assert grows(size, PADDED)
    assert grows(8 - T, frozenset({S}))
    for size in (80 - S, S - T, Mod(S, 3), S - FloorDiv(S, 2), FloorDiv(64, S), S * (S - 5)):
        assert not grows(size, PADDED)


def test_what_is_not_padded_may_be_regrouped() -> None:
    n = sympy.Symbol("n", positive=True, integer=True)
    assert split([2 * n, S], [n, 2, S], PADDED) == ((n,), (2,), (S,))
    assert split([S, n - 2, n - 2], [S, (n - 2) ** 2], PADDED) == ((S,), ((n - 2) ** 2,))


def test_operands_of_different_order_do_not_combine() -> None:
    assert broadcast([((S,), (4,)), ((4,),)], PADDED) == ((S,), (4,))
    with pytest.raises(NotPaddableError):
        broadcast([((4, S),), ((S, 4),)], PADDED)
    assert broadcast([((4, S),), (UniformDim((S, 4)),)], PADDED) == ((4, S),)
    assert view((UniformDim((S, T)),), [T, S], PADDED) == ((T,), (S,))
