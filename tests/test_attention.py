"""scaled_dot_product_attention: one node forward, one backward, with the CPU's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import lazyxla
from lazyxla.dynamo import backend
from tests.support import error_of

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("from_zero")]

N, S, T, D = 2, 6, 8, 16


@pytest.fixture
def from_zero() -> None:
    """The counters begin with the test."""
    lazyxla.reset_counters()


# Heads of queries and of keys, the mask (shape and kind), and other arguments.
CASES: dict[str, tuple[int, int, Any, dict[str, Any]]] = {
    "plain": (4, 4, None, {}),
    "causal": (4, 4, None, {"is_causal": True}),
    "scaled": (4, 4, None, {"scale": 0.3}),
    "grouped heads": (4, 2, None, {"enable_gqa": True, "is_causal": True}),
    "one head of keys": (4, 1, ((S, T), torch.float32), {"enable_gqa": True}),
    "mask of bools": (4, 4, ((N, 1, S, T), torch.bool), {}),
    "mask of numbers": (4, 4, ((N, 4, S, T), torch.float32), {}),
}


def inputs(
    case: str, dtype: torch.dtype, rows: int = S, columns: int = T
) -> tuple[list[Tensor], dict[str, Any]]:
    heads, groups, mask, kwargs = CASES[case]
    tensors = [
        torch.randn(N, h, n, D, dtype=dtype)
        for h, n in ((heads, rows), (groups, columns), (groups, columns))
    ]
    if mask is None:
        return tensors, kwargs
    shape, kind = mask
    shape = (*shape[:-2], rows, columns)
    made = torch.rand(shape) > 0.3 if kind == torch.bool else torch.randn(shape, dtype=dtype)
    if kind == torch.bool:
        made[..., 2, :] = False  # a query that sees nothing: its result is 0
    return tensors, {**kwargs, "attn_mask": made}


def attend(
    device: str,
    case: list[Tensor],
    kwargs: dict[str, Any],
    call: Callable[..., Tensor] = F.scaled_dot_product_attention,
) -> list[Tensor]:
    """The result, and the gradients of a weighted sum."""
    args = [x.detach().to(device).requires_grad_() for x in case]
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    result = call(*args, **moved)
    weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view(result.shape)
    result.backward(weights.to(device))
    return [result.detach(), *(x.grad for x in args if x.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case: str, dtype: torch.dtype) -> None:
    check_as_on_the_cpu(*inputs(case, dtype))


def check_as_on_the_cpu(tensors: list[Tensor], kwargs: dict[str, Any]) -> None:
    expected = attend("cpu", tensors, kwargs)
    for ours, theirs in zip(attend("lazyxla", tensors, kwargs), expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)
        assert ours.stride() == theirs.stride()
    assert lazyxla.fallbacks() == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_half_precision(case: str, dtype: torch.dtype) -> None:
    """As near to the exact result as the CPU's kernel, whose own error may be beyond the
    tolerances."""
    check_half_precision(*inputs(case, dtype))


def check_half_precision(tensors: list[Tensor], kwargs: dict[str, Any]) -> None:
    theirs = attend("cpu", tensors, kwargs)
    ours = attend("lazyxla", tensors, kwargs)
    in_double = {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in kwargs.items()
    }
    exact = attend("cpu", [x.double() for x in tensors], in_double)
    for x, y, z in zip(ours, theirs, exact, strict=True):
        assert x.dtype == y.dtype
        # PyTorch's own tolerances, and the error of its kernel twice: how exact that is depends on
        # the processor.
        rtol, atol = torch.testing._comparison.default_tolerances(x.dtype)
        atol += 2 * (y.double() - z).abs().max().item()
        torch.testing.assert_close(x.cpu().double(), z, rtol=rtol, atol=atol)


def recorded(**kwargs: Any) -> int:
    """How many operators a call of attention records."""
    x = torch.ones(2, 4, 8, 16).to("lazyxla")
    lazyxla.sync()
    lazyxla.reset_counters()
    F.scaled_dot_product_attention(x, x, x, **kwargs)
    return lazyxla.counters()["nodes_recorded"]


def test_is_one_node() -> None:
    assert recorded() == 1
    assert recorded(is_causal=True, scale=2.0) == 1


@pytest.mark.parametrize("traced", [False, True])
def test_draws_random_numbers_for_dropout_only(traced: bool, fresh_dynamo: None) -> None:
    """PyTorch tags its attention for CPUs as random, though it has no dropout."""

    def attention(x: Tensor, p: float) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=p)

    x = torch.randn(2, 4, 8, 16).to("lazyxla")
    call = torch.compile(attention, backend=backend) if traced else attention
    before = torch.lazyxla.get_rng_state()
    call(x, 0.0).cpu()
    assert torch.equal(torch.lazyxla.get_rng_state(), before)
    call(x, 0.5).cpu()
    assert not torch.equal(torch.lazyxla.get_rng_state(), before)


def test_eager_mode_runs_one_program_each_way() -> None:
    tensors = [torch.randn(2, 4, 8, 16).to("lazyxla").requires_grad_() for _ in range(3)]
    grad = torch.randn(2, 4, 8, 16).to("lazyxla")
    with lazyxla.eager_mode(True):
        lazyxla.reset_counters()
        result = F.scaled_dot_product_attention(*tensors, is_causal=True)
        torch.autograd.grad(result, tensors, grad)
    assert lazyxla.counters()["executions"] == 2


def attend_with(factors: Tensor, case: list[Tensor], kwargs: dict[str, Any]) -> list[Tensor]:
    """On the CPU: the result and the gradients if the weights are multiplied with these factors."""
    q, k, v = (x.detach().requires_grad_() for x in case)
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = q @ keys.mT * kwargs.get("scale", D**-0.5)
    mask = kwargs.get("attn_mask")
    if kwargs.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        bias = torch.zeros(()).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask
        scores = scores + bias
    weights = scores.softmax(-1).nan_to_num()  # 0 for a query that sees nothing
    result = (weights * factors) @ values
    result.backward(torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view(result.shape))
    return [result.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def dropped(heads: int, p: float) -> Tensor:
    """What a call after torch.manual_seed(1) multiplies its weights (N, heads, S, T) with."""
    torch.manual_seed(1)
    zeros = torch.zeros(N, heads, S, T).to("lazyxla")
    eye = torch.eye(T).expand(N, heads, T, T).to("lazyxla")
    return F.scaled_dot_product_attention(zeros, zeros[:, :, :1].expand_as(eye), eye, dropout_p=p)


@pytest.mark.parametrize("case", [c for c in CASES if c != "mask of bools"])
def test_dropout(case: str) -> None:
    """The gradients are those of the weights that the forward pass has dropped."""
    tensors, kwargs = inputs(case, torch.float64)
    factors = dropped(CASES[case][0], 0.25).cpu() * T
    kept = factors != 0
    assert 0.6 < kept.double().mean() < 0.9
    torch.testing.assert_close(factors[kept], torch.full_like(factors[kept], 1 / 0.75))
    factors = kept / 0.75
    torch.manual_seed(1)
    ours = attend("lazyxla", tensors, {**kwargs, "dropout_p": 0.25})
    for x, y in zip(ours, attend_with(factors, tensors, kwargs), strict=True):
        torch.testing.assert_close(x.cpu(), y)
        assert x.is_contiguous()
    assert lazyxla.fallbacks() == {}


def test_dropout_is_one_node_each_way() -> None:
    assert recorded(dropout_p=0.5) == 1
    tensors = [torch.randn(N, 4, S, D).to("lazyxla").requires_grad_() for _ in range(3)]
    with lazyxla.eager_mode(True):
        lazyxla.reset_counters()
        results = [F.scaled_dot_product_attention(*tensors, dropout_p=0.5) for _ in range(2)]
        torch.autograd.grad(results[0].sum(), tensors)
    n = lazyxla.counters()
    assert n["executions"] == 5  # two calls, a sum, the gradients of the sum and of attention
    assert not torch.equal(*results)


def test_all_or_nothing_is_dropped() -> None:
    tensors, _ = inputs("plain", torch.float32)
    for result in attend("lazyxla", tensors, {"dropout_p": 1.0}):
        assert torch.equal(result.cpu(), torch.zeros_like(result.cpu()))


def test_dropout_under_transforms_is_composed(fresh_dynamo: None) -> None:
    x = torch.randn(3, N, 4, S, D).to("lazyxla")

    def attention(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    mapped = torch.vmap(attention, randomness="different")(x)
    assert mapped.shape == x.shape
    assert lazyxla.fallbacks() == {}


@pytest.mark.parametrize("case", [c for c in CASES if c != "mask of bools"])
def test_dropout_in_a_traced_graph(
    case: str, fresh_dynamo: None, traced_operators: list[str]
) -> None:
    """One node each way, whose gradients are those of the weights that were dropped."""
    tensors, kwargs = inputs(case, torch.float64)
    factors = dropped(CASES[case][0], 0.25).cpu() * T
    kept = factors != 0
    assert 0.6 < kept.double().mean() < 0.9
    torch.manual_seed(1)
    compiled = torch.compile(F.scaled_dot_product_attention, backend=backend, fullgraph=True)
    ours = attend("lazyxla", tensors, {**kwargs, "dropout_p": 0.25}, compiled)
    for x, y in zip(ours, attend_with(kept / 0.75, tensors, kwargs), strict=True):
        torch.testing.assert_close(x.cpu(), y)
    ops = [name for name in traced_operators if "attention" in name or "softmax" in name]
    assert ops == [f"lazyxla.dropout_attention{part}.default" for part in ("", "_backward")]
    assert lazyxla.fallbacks() == {}


@pytest.mark.parametrize("dynamic", [False, True])
def test_dropout_with_sizes_that_vary(dynamic: bool, fresh_dynamo: None) -> None:
    def attention(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    compiled = torch.compile(attention, backend=backend, fullgraph=True, dynamic=dynamic)
    for rows in (5, 6, 7):
        x = torch.randn(N, 4, rows, D).to("lazyxla").requires_grad_()
        result = compiled(x)
        assert result.shape == x.shape
        (gradient,) = torch.autograd.grad(result.sum(), x)
        assert gradient.shape == x.shape
        assert gradient.isfinite().all()
    assert lazyxla.fallbacks() == {}


def test_the_users_choice_counts() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert recorded() > 1


def test_what_has_no_node_is_composed() -> None:
    """Masks with gradients, values of another size, three dimensions."""
    q, k = torch.randn(2, 4, S, D), torch.randn(2, 4, T, D)
    v, mask = torch.randn(2, 4, T, 5), torch.randn(S, T)
    results = []
    for device in ("cpu", "lazyxla"):
        a = [x.detach().to(device).requires_grad_() for x in (q, k, v, mask)]
        batched = F.scaled_dot_product_attention(a[0], a[1], a[2], attn_mask=a[3])
        flat = F.scaled_dot_product_attention(*(x[0] for x in a[:3]))
        grads = torch.autograd.grad(batched.square().sum() + flat.square().sum(), a)
        results.append([batched, flat, *grads])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


# Heads of keys, the shape of the mask, and other arguments.
REFUSED: dict[str, tuple[int, tuple[int, ...] | None, dict[str, Any]]] = {
    "fewer heads": (2, None, {}),
    "fewer heads, no divisor": (3, None, {"enable_gqa": True}),
    "mask of another size": (4, (S, T + 1), {}),
    "mask of another size, with dropout": (4, (S, T + 1), {"dropout_p": 0.5}),
    "mask for more samples": (4, (N + 1, 1, S, T), {}),
    "mask of five dimensions": (4, (1, N, 4, S, T), {}),
    "causal, with a mask and dropout": (4, (S, T), {"is_causal": True, "dropout_p": 0.5}),
    "more than all is dropped": (4, None, {"dropout_p": 2.0}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_cpu_refuses_is_refused_at_the_call(case: str) -> None:
    heads, mask, kwargs = REFUSED[case]

    def call(device: str) -> Tensor:
        q = torch.ones(N, 4, S, D, device=device)
        k = torch.ones(N, heads, T, D, device=device)
        m = None if mask is None else torch.zeros(mask, device=device)
        return F.scaled_dot_product_attention(q, k, k, attn_mask=m, **kwargs)

    expected = error_of(call, "cpu")
    assert expected[0] is not type(None)
    assert error_of(call, "lazyxla") == expected


def test_dropout_is_no_negative_probability() -> None:
    q = torch.ones(N, 4, S, D, device="lazyxla")
    with pytest.raises(RuntimeError, match=r"between 0 and 1, but got -0\.5"):
        F.scaled_dot_product_attention(q, q, q, dropout_p=-0.5)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_no_gradient_makes_no_gradients(dropout: float) -> None:
    tensors = [x.to("lazyxla").requires_grad_() for x in inputs("plain", torch.float32)[0]]
    result = F.scaled_dot_product_attention(*tensors, dropout_p=dropout)
    later = torch._C._functions.UndefinedGrad()(result)  # its backward gives none
    found = torch.autograd.grad(later, tensors, torch.ones_like(later), allow_unused=True)
    assert found == (None, None, None)
    lazyxla.sync()
    assert lazyxla.fallbacks() == {}


def test_in_a_traced_graph(fresh_dynamo: None) -> None:
    # Not in float32: the gradients of squares of sums cancel beyond its tolerances.
    tensors, kwargs = inputs("grouped heads", torch.float64)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * 2, k, v, **kwargs).sum(1)

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    results = []
    for call, device in ((function, "cpu"), (compiled, "lazyxla")):
        a = [x.detach().to(device).requires_grad_() for x in tensors]
        result = call(*a)
        results.append([result, *torch.autograd.grad(result.square().sum(), a)])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)
    assert lazyxla.fallbacks() == {}
