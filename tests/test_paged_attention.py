"""Attention over a cache in pages: as JAX's reference has it, on the device and on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import Tensor

import lazyxla
from tests.support import needs_libtpu

jax.config.update("jax_platforms", "cpu")

DEVICE = "lazyxla"
PAGES, ROWS, GROUPS, SIZE, HEADS = 24, 4, 2, 8, 4
MOST_SEQUENCES, MOST_PAGES, MOST_TOKENS = 5, 6, 32


def example(
    new: list[int], old: list[int], dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, ...]:
    """So many new tokens of each sequence, and so many that were in the cache before."""
    random = torch.Generator().manual_seed(seed)
    query = torch.randn(MOST_TOKENS, HEADS, SIZE, generator=random).to(dtype)
    pages = torch.randn(PAGES, ROWS, 2 * GROUPS, SIZE, generator=random).to(dtype)
    order = torch.randperm(PAGES, generator=random).int()
    indices = torch.zeros(MOST_SEQUENCES, MOST_PAGES, dtype=torch.int32)
    lengths = torch.full((MOST_SEQUENCES,), 99, dtype=torch.int32)  # of those that there are not
    starts = torch.zeros(MOST_SEQUENCES + 1, dtype=torch.int32)
    used = 0
    for number, (fresh, before) in enumerate(zip(new, old, strict=True)):
        lengths[number] = fresh + before
        starts[number + 1] = starts[number] + fresh
        count = -(-(fresh + before) // ROWS)
        indices[number, :count] = order[used : used + count]
        used += count
    return query, pages, lengths, indices, starts, torch.tensor([len(new)], dtype=torch.int32)


def of_jax(inputs: tuple[Tensor, ...], **kwargs: Any) -> np.ndarray:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import (
        ref_ragged_paged_attention,
    )

    given = [np.asarray(lazyxla.to_jax(x)) for x in inputs]
    return np.asarray(ref_ragged_paged_attention(*given, **kwargs)).astype(np.float32)


def expected_of(
    inputs: tuple[Tensor, ...],
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """The definition, sequence by sequence."""
    query, pages, lengths, indices, starts, count = inputs
    found = []
    for number in range(int(count)):
        first, end, length = int(starts[number]), int(starts[number + 1]), int(lengths[number])
        cache = pages[indices[number].long()].flatten(0, 1)[:length].float()
        key, value = (cache[:, i::2].repeat_interleave(HEADS // GROUPS, 1) for i in (0, 1))
        scores = torch.einsum("qhd,khd->hqk", query[first:end].float(), key) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        behind = torch.arange(length - (end - first), length)[:, None] - torch.arange(length)
        seen = behind >= 0
        if sliding_window is not None:
            seen &= behind < sliding_window
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        found.append(torch.einsum("hqk,khd->qhd", weights, value))
    return torch.cat(found)


CASES: dict[str, tuple[list[int], list[int]]] = {
    "decoding": ([1, 1, 1], [7, 3, 11]),
    "beginning": ([5, 9], [0, 0]),
    "mixed": ([1, 6, 1, 3], [10, 0, 4, 8]),
    "one": ([4], [0]),
}
OPTIONS: list[dict[str, Any]] = [{}, {"sliding_window": 3}, {"soft_cap": 1.5}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_as_defined(name: str, options: dict[str, Any]) -> None:
    inputs = example(*CASES[name])
    count = sum(CASES[name][0])
    expected = expected_of(inputs, 0.3, **options)
    before = lazyxla.counters()
    ours = lazyxla.ragged_paged_attention(*(x.to(DEVICE) for x in inputs), scale=0.3, **options)
    on_the_cpu = lazyxla.ragged_paged_attention(*inputs, scale=0.3, **options)
    assert not ours.cpu()[count:].any()
    assert not on_the_cpu[count:].any()
    assert lazyxla.counters()["fallbacks"] == before["fallbacks"]
    torch.testing.assert_close(ours.cpu()[:count], expected)
    torch.testing.assert_close(on_the_cpu[:count], expected)


def test_the_kernel_means_the_same() -> None:
    """As JAX's own reference of its kernel says."""
    inputs = example(*CASES["mixed"])
    options = {"sliding_window": 3, "soft_cap": 1.5}
    count = sum(CASES["mixed"][0])
    theirs = torch.tensor(of_jax(inputs, sm_scale=0.3, **options))[:count]
    # It masks with a number that is not quite infinite.
    torch.testing.assert_close(expected_of(inputs, 0.3, **options), theirs, rtol=1e-4, atol=1e-5)


def test_many_random_ones() -> None:
    """Nothing is compiled anew while sequences come, grow and go."""
    choose = np.random.default_rng(0)
    compiles = []
    for number in range(30):
        count = int(choose.integers(1, 5))
        new = [int(n) for n in choose.integers(1, 7, count)]
        old = [int(n) for n in choose.integers(0, ROWS * MOST_PAGES - 6, count)]
        inputs = example(new, old, seed=number)
        ours = lazyxla.ragged_paged_attention(*(x.to(DEVICE) for x in inputs))
        torch.testing.assert_close(ours.cpu()[: sum(new)], expected_of(inputs, SIZE**-0.5))
        compiles.append(lazyxla.counters()["compiles"])
    assert compiles[-1] == compiles[3]


def test_in_compiled_functions_and_lower_types(fresh_dynamo: None) -> None:
    inputs = example(*CASES["mixed"], dtype=torch.bfloat16)
    given = [x.to(DEVICE) for x in inputs]
    call: Callable[..., Tensor] = lambda *args: lazyxla.ragged_paged_attention(*args) * 2  # noqa: E731
    compiled = torch.compile(call, backend="lazyxla", fullgraph=True)
    ours = compiled(*given)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, call(*given))
    expected = expected_of(inputs, SIZE**-0.5).bfloat16() * 2
    torch.testing.assert_close(ours.cpu()[: len(expected)], expected)


@needs_libtpu
def test_a_kernel_on_tpus() -> None:
    query = torch.randn(128, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    pages = torch.randn(64, 16, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    numbers = [torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (8, 9, 1)]
    indices = torch.zeros(8, 32, dtype=torch.int32, device=DEVICE)
    inputs = (query, pages, numbers[0], indices, numbers[1], numbers[2])
    program = lazyxla.aot.compile(lazyxla.ragged_paged_attention, inputs, topology="v5e:1x1")
    assert "tpu_custom_call" in program.optimized_hlo()


def change(position: int, x: Tensor) -> tuple[Tensor, ...]:
    inputs = list(example(*CASES["one"]))
    inputs[position] = x
    return tuple(inputs)


@pytest.mark.parametrize(
    ("position", "x", "error", "message"),
    [
        (0, torch.ones(4, 4), ValueError, "expected query"),
        (0, torch.ones(4, 3, SIZE), ValueError, "3 heads do not divide"),
        (1, torch.ones(4, 4, 3, SIZE), ValueError, "do not divide"),
        (2, torch.ones(4, dtype=torch.int32), ValueError, "expected kv_lengths"),
        (3, torch.ones(4, dtype=torch.int32), ValueError, "expected kv_lengths"),
        (5, torch.ones(1), TypeError, "int32, got torch.float32"),
    ],
)
def test_bad_input(position: int, x: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lazyxla.ragged_paged_attention(*change(position, x))
