"""Scatters on the CPU are of one index into the operand's memory."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch

from lazyxla.lowering.builder import Builder
from lazyxla.lowering.cpu import scatter
from lazyxla.lowering.value import Value
from tests.lowering.bench import Bench

_COMBINED = ("assign", "add", "mul", "min", "max")


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scatter, "_FEW", 0)


def combined(kind: str, old: float, new: float) -> float:
    return {"assign": new, "add": old + new, "mul": old * new}.get(
        kind, {"min": min, "max": max}.get(kind, max)(old, new)
    )


def indices_for(draw: random.Random, size: int, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Some are out of range, and some equal, except where the last of equal ones would win."""
    count = math.prod(shape)
    if kind == "assign":
        found = draw.sample(range(-2, max(size + 2, count)), count)
    else:
        found = [draw.randint(-1, size) for _ in range(count)]
    return torch.tensor(found, dtype=draw.choice([torch.int64, torch.int32])).reshape(shape)


@pytest.mark.parametrize("seed", range(25))
def test_along_a_dimension(seed: int, bench: Bench) -> None:
    draw, kind = random.Random(seed), _COMBINED[seed % len(_COMBINED)]
    torch.manual_seed(seed)
    shape = tuple(draw.randint(1, 4) for _ in range(draw.randint(2, 4)))
    dim = draw.randrange(len(shape))
    others = [d for d in range(len(shape)) if d != dim]
    repeated = draw.sample(others, draw.randint(0, len(others)))
    sizes = [1 if d in repeated else n for d, n in enumerate(shape)]
    rows = math.prod(sizes) // sizes[dim]
    index = torch.stack([indices_for(draw, shape[dim], kind, (5,)) for _ in range(rows)])
    index = index.reshape([sizes[d] for d in others] + [5]).movedim(-1, dim).contiguous()
    whole = [5 if d == dim else n for d, n in enumerate(shape)]
    x, updates = torch.randn(shape), torch.randn(whole)

    expected = x.clone()
    for at in itertools.product(*map(range, whole)):
        to = int(index.expand(whole)[at])
        target = (*at[:dim], to, *at[dim + 1 :])
        if 0 <= to < shape[dim]:
            expected[target] = combined(kind, float(expected[target]), float(updates[at]))

    def rule(b: Builder, x: Value, index: Value, updates: Value) -> Any:
        return b.scatter_along(x, b.broadcast_to(index, whole), updates, dim, kind)

    bench.check(rule, x, index, updates, expected=expected)
    text = bench.text(rule, x, index, updates, expected=expected)
    assert "scatter_dims_to_operand_dims = [0]" in text
    assert "batching_dims" not in text


@pytest.mark.parametrize("seed", range(25))
def test_at_index_vectors(seed: int, bench: Bench) -> None:
    draw, kind = random.Random(seed), _COMBINED[seed % len(_COMBINED)]
    torch.manual_seed(seed)
    shape = tuple(draw.randint(1, 4) for _ in range(draw.randint(2, 4)))
    dims = draw.sample(range(len(shape)), draw.randint(1, len(shape)))
    batch = draw.choice([(6,), (2, 3)])
    parts = [indices_for(draw, shape[d], kind, batch).long() for d in dims]
    index = torch.stack(parts, -1)
    windows = [n for d, n in enumerate(shape) if d not in dims]
    x, updates = torch.randn(shape), torch.randn(*batch, *windows)

    expected = x.clone()
    for at in itertools.product(*map(range, batch)):
        vector = index[at].tolist()
        if all(0 <= i < shape[d] for i, d in zip(vector, dims, strict=True)):
            to = tuple(vector[dims.index(d)] if d in dims else slice(None) for d in range(x.dim()))
            old, new = expected[to].reshape(-1), updates[at].reshape(-1)
            both = zip(old.tolist(), new.tolist(), strict=True)
            new = torch.tensor([combined(kind, a, b) for a, b in both])
            expected[to] = new.reshape(expected[to].shape)

    def rule(b: Builder, x: Value, index: Value, updates: Value) -> Any:
        return b.scatter_nd(x, index, updates, dims, kind)

    bench.check(rule, x, index, updates, expected=expected)
    text = bench.text(rule, x, index, updates, expected=expected)
    assert "scatter_dims_to_operand_dims = [0]" in text
    assert ("update_window_dims = [1" in text) == (len(shape) - 1 not in dims)


def test_small_ones_stay_as_they_are(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    x, index = torch.randn(8, 8), torch.randint(0, 8, (8, 8))

    def rule(b: Builder, x: Value, index: Value, updates: Value) -> Any:
        return b.scatter_along(x, index, updates, 1, "add")

    expected = x.scatter_add(1, index, x)
    assert "batching_dims" not in bench.text(rule, x, index, x, expected=expected)
    monkeypatch.setattr(scatter, "_FEW", 64)
    assert "batching_dims" in bench.text(rule, x, index, x, expected=expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_an_index_may_be_of_few_bits(dtype: torch.dtype, bench: Bench) -> None:
    """The sizes do not fit in its dtype."""
    x, updates = torch.randn(3, 300), torch.randn(3, 40)
    index = torch.stack([torch.randperm(100)[:40] for _ in range(3)]).to(dtype)

    def rule(b: Builder, x: Value, index: Value, updates: Value) -> Any:
        return b.scatter_along(x, index, updates, 1)

    bench.check(rule, x, index, updates, expected=x.scatter(1, index.long(), updates))
