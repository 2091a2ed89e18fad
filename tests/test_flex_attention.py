"""``flex_attention``: values and gradients as the formula has them on the CPU, in one program."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import lazyxla

DEVICE = "lazyxla"
B, H, L, S, E = 2, 4, 40, 48, 8

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "uncut")

Mod = Callable[..., Tensor] | None


def relative(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + (q - k) * 0.05 / (h + 1)


def softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.tanh(score / 2) * 2


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k <= 6)


def by_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q + k) % (h + 2) != b


def with_bias(bias: Tensor) -> Mod:
    return lambda score, b, h, q, k: score * 0.7 + bias[h, q] - bias[h, k] ** 2


def of_documents(document: Tensor) -> Mod:
    return lambda b, h, q, k: (document[q] == document[k]) & (q >= k)


# By name: what makes the modification of the scores and the mask from captured tensors.
CASES: dict[str, tuple[Callable[[Tensor], Mod], Callable[[Tensor], Mod]]] = {
    "plain": (lambda _: None, lambda _: None),
    "relative": (lambda _: relative, lambda _: None),
    "causal": (lambda _: None, lambda _: causal),
    "window": (lambda _: softcap, lambda _: window),
    "by head": (lambda _: relative, lambda _: by_head),
    "captured": (with_bias, of_documents),
}


def formula(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Mod, mask_mod: Mod, heads: int
) -> tuple[Tensor, Tensor]:
    """The output and the logarithm of the sum, as PyTorch's documentation has them."""
    k, v = (x.repeat_interleave(q.shape[1] // heads, 1) for x in (k, v))
    scores = q.float() @ k.float().mT / E**0.5
    indices = torch.meshgrid(*(torch.arange(n) for n in scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, *indices)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*indices), -float("inf"))
    weights = torch.nan_to_num(scores.softmax(-1))
    return (weights.to(q.dtype) @ v).to(q.dtype), scores.logsumexp(-1)


def run(
    name: str,
    call: Callable[..., Any],
    dtype: torch.dtype = torch.float32,
    heads: int = H,
) -> None:
    """Compares the outputs and all gradients."""
    torch.manual_seed(0)
    shapes = [(B, H, L, E), (B, heads, S, E), (B, heads, S, E)]
    inputs = [torch.randn(shape, dtype=dtype) for shape in shapes]
    bias, document = torch.randn(H, S), torch.arange(S) // 12
    gradient = torch.randn(B, H, L, E).to(dtype)
    found = []
    for device in ("cpu", DEVICE):
        q, k, v = given = [x.to(device).requires_grad_() for x in inputs]
        captured = bias.to(device).requires_grad_()
        make_score, make_mask = CASES[name]
        score_mod, mask_mod = make_score(captured), make_mask(document.to(device))
        if device == "cpu":
            results: Any = formula(q, k, v, score_mod, mask_mod, heads)
        else:
            mask = None
            if mask_mod is not None:
                mask = create_block_mask(mask_mod, B, H, L, S, device=device, BLOCK_SIZE=16)
            lazyxla.sync(wait=True)
            lazyxla.reset_counters()
            results = call(q, k, v, score_mod, mask, enable_gqa=heads != H, return_lse=True)
        wanted = [*given, captured] if name == "captured" else given
        gradients = torch.autograd.grad(
            [results[0], results[1].nan_to_num(neginf=0)],
            wanted,
            [gradient.to(device), torch.ones_like(results[1])],
        )
        found.append([*results, *gradients])
    lazyxla.sync(wait=True)
    counters = lazyxla.counters()
    assert (counters["executions"], counters["fallbacks"]) == (1, 0)
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert ours.dtype == theirs.dtype
        if dtype == torch.float32:
            # Sums over 48 keys in other orders.
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)
        else:
            # Scores are rounded to bfloat16 at other places.
            torch.testing.assert_close(ours.cpu(), theirs, rtol=5e-2, atol=5e-2)


def quiet(*args: Any, **kwargs: Any) -> Any:
    """Without PyTorch's advice to compile it, and of the deprecated way to get the sum."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return flex_attention(*args, **kwargs)


@pytest.mark.parametrize("name", CASES)
def test_recorded(name: str) -> None:
    run(name, quiet)


@pytest.mark.parametrize("name", CASES)
def test_compiled(name: str) -> None:
    run(name, torch.compile(flex_attention, backend="lazyxla", fullgraph=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_queries(dtype: torch.dtype) -> None:
    compiled = torch.compile(flex_attention, backend="lazyxla", fullgraph=True)
    run("relative", compiled, dtype, heads=2)
    run("causal", quiet, dtype, heads=2)


def test_autocast() -> None:
    q, k, v = (torch.randn(B, H, L, E, device=DEVICE) for _ in range(3))
    compiled = torch.compile(flex_attention, backend="lazyxla", fullgraph=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        for call in (quiet, compiled):
            assert call(q, k, v).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["relative", "causal"])
def test_sizes_that_change(name: str) -> None:
    make_score, make_mask = CASES[name]
    none = torch.empty(0)
    compiled = torch.compile(flex_attention, backend="lazyxla", dynamic=True)
    for length in (16, 24, 40, 16):
        inputs = [torch.randn(B, H, length, E) for _ in range(3)]
        on_device = [x.to(DEVICE) for x in inputs]
        mask_mod, block_mask = make_mask(none), None
        if mask_mod is not None:
            block_mask = create_block_mask(mask_mod, B, H, length, length, DEVICE, BLOCK_SIZE=8)
        ours = compiled(*on_device, score_mod=make_score(none), block_mask=block_mask)
        theirs, _ = formula(*inputs, make_score(none), mask_mod, H)
        # Sums in other orders, as above.
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)
    assert lazyxla.counters()["fallbacks"] == 0


def test_in_a_model_that_trains() -> None:
    """One program per step, whether compiled or not."""
    torch.manual_seed(0)
    project = torch.nn.Linear(E * H, 3 * E * H).to(DEVICE)
    mask = create_block_mask(causal, None, None, L, L, DEVICE, BLOCK_SIZE=16)
    x = torch.randn(B, L, H * E, device=DEVICE)

    def loss_of(x: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        q, k, v = project(x).unflatten(-1, (3, H, E)).permute(2, 0, 3, 1, 4)
        return attention(q, k, v, block_mask=mask).square().mean()

    compiled = torch.compile(lambda x: loss_of(x, flex_attention), backend="lazyxla")
    for step in (lambda x: loss_of(x, quiet), compiled):
        optimizer = torch.optim.Adam(project.parameters())
        for number in range(5):
            before = lazyxla.counters()
            step(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            lazyxla.sync()
            after = lazyxla.counters()
            if number >= 3:
                assert after["executions"] == before["executions"] + 1
                assert after["compiles"] == before["compiles"]


def test_other_devices_are_checked_as_before() -> None:
    q = torch.randn(1, 1, 8, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        flex_attention(q, q, q)
    meta = torch.empty(1, 1, 8, 8, device="meta")
    with pytest.raises(ValueError, match="only supported on"):
        flex._validate_device(meta, meta, meta)
