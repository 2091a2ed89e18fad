"""Which attention programs for the CPU leave to PyTorch's kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import lazyxla
from lazyxla.lowering.cpu import attention, kernel_limits
from tests.support import assert_same, counted, on_device


@pytest.fixture(autouse=True)
def all_pay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On every processor, and small ones, too. The sizes here are of no other test's programs."""
    monkeypatch.setattr(attention, "_LEAST", 1)
    with kernel_limits.using({"attention float32": 1, "attention bfloat16": 12}):
        yield


def compare(
    query: tuple[int, ...],
    keys: int,
    *,
    mask: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    calls: int = 2,
    tolerance: float | None = None,
    **options: object,
) -> None:
    """The result and all gradients; `tolerance` is relative and absolute."""
    samples, heads, _, width = query
    shapes = (query, (samples, heads, keys, width), (samples, heads, keys, width))
    tensors = [torch.randn(*shape).to(dtype) for shape in shapes]
    added = None
    if mask is not None:
        added = torch.randn(*mask).to(dtype).masked_fill(torch.rand(*mask) < 0.2, -math.inf)
        added[..., 0] = 0  # no row is left out as a whole
    grad = torch.randn(*query).to(dtype)

    def run(device: str) -> list[Tensor]:
        leaves = [t.to(device).requires_grad_() for t in tensors]
        given = None if added is None else added.to(device)
        y = F.scaled_dot_product_attention(*leaves, attn_mask=given, **options)  # type: ignore[arg-type]
        return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(device))]

    with counted() as n:
        got = run("lazyxla")
        lazyxla.sync(wait=True)
    assert (n.kernel_calls, n.host_calls, n.fallbacks, n.executions) == (calls, 0, 0, 1)
    for ours, expected in zip(got, run("cpu"), strict=True):
        if tolerance is None:
            assert_same(ours, expected)
        else:
            torch.testing.assert_close(ours.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("samples", [1, 2, 5])
@pytest.mark.parametrize("is_causal", [False, True])
def test_split_by_samples_or_heads(dtype: torch.dtype, samples: int, is_causal: bool) -> None:
    """The threads' shares are unequal."""
    compare((samples, 3, 13, 16), 13, dtype=dtype, is_causal=is_causal)


@pytest.mark.parametrize(
    "mask",
    [
        *((11, 17), (1, 17), (11, 1), (1, 1, 11, 17), (2, 1, 11, 17), (1, 3, 11, 17)),
        *((2, 3, 11, 17), (2, 1, 1, 17), (1, 1, 1, 17), (2, 3, 11, 1)),
    ],
    ids=str,
)
def test_masks(mask: tuple[int, ...]) -> None:
    """Of more heads than samples, and of fewer."""
    compare((2, 3, 11, 16), 17, mask=mask, scale=0.5)
    turned = (mask[1], mask[0], *mask[2:]) if len(mask) == 4 else mask
    compare((3, 2, 11, 16), 17, mask=turned, scale=0.5)


def test_masks_of_bools() -> None:
    q = torch.randn(2, 3, 12, 16)
    mask = torch.rand(12, 12) < 0.7
    mask[:, 0] = True
    ours = on_device(q)
    with counted() as n:
        got = F.scaled_dot_product_attention(ours, ours, ours, attn_mask=on_device(mask))
        lazyxla.sync(wait=True)
    assert (n.kernel_calls, n.host_calls, n.fallbacks) == (1, 0, 0)
    assert_same(got, F.scaled_dot_product_attention(q, q, q, attn_mask=mask))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_other_dtypes_are_not_called(dtype: torch.dtype) -> None:
    # PyTorch's own result in float16 is up to 0.0017 off that in float64, by the processor.
    tolerance = 0.002 if dtype == torch.float16 else None
    compare((2, 3, 14, 16), 15, dtype=dtype, calls=0, tolerance=tolerance)


@pytest.mark.parametrize(("least", "keys"), [(1, 11), (1 << 40, 15)])
def test_small_ones_are_not_called(least: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_LEAST", least)
    q = torch.randn(2, 3, keys, 16, dtype=torch.bfloat16)
    ours = on_device(q)
    with counted() as n:
        got = F.scaled_dot_product_attention(ours, ours, ours)
        lazyxla.sync(wait=True)
    assert (n.kernel_calls, n.host_calls, n.fallbacks) == (0, 0, 0)
    assert_same(got, F.scaled_dot_product_attention(q, q, q))


def test_groups_of_heads_are_not_called() -> None:
    q, k = torch.randn(1, 6, 16, 16), torch.randn(1, 3, 16, 16)
    ours = on_device(q), on_device(k)
    with counted() as n:
        got = F.scaled_dot_product_attention(ours[0], ours[1], ours[1], enable_gqa=True)
        lazyxla.sync(wait=True)
    assert (n.kernel_calls, n.host_calls, n.fallbacks) == (0, 0, 0)
    assert_same(got, F.scaled_dot_product_attention(q, k, k, enable_gqa=True))


def test_dropout_is_not_called() -> None:
    q = on_device(torch.randn(1, 3, 18, 16))
    with counted() as n:
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        lazyxla.sync(wait=True)
    assert (n.kernel_calls, n.host_calls, n.fallbacks) == (0, 0, 0)
